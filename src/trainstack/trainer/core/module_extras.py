"""`ModuleExtras`: the state of a module that an exact resume needs and that is not in its `state_dict`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.core.fingerprints import checksums
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.state_tree import same

EXTRAS = "extras"
"""The key of this state in `Checkpoint.trainer_state` and in `Checkpoint.rank_states`."""

_Form = tuple[torch.dtype, list[int]] | None


class ModuleExtras:
    """Frozen flags, non-persistent buffers, and buffers whose dtype or shape differs from the start.

    A checkpoint holds only the values that training has changed. If the code sets another flag or table before the run
    resumes, the module keeps this new value.

    Args:
        module: module after `__init__`, before its state is loaded.

    Attributes:
        is_fixed: whether the module has been restored or trained, so that its current values are not a start.
    """

    is_fixed = False

    def __init__(self, module: nn.Module) -> None:
        self._module, self._stale, self._reshaped = module, frozenset[str](), dict[str, _Form]()
        self._names = {without_wrappers(name) for name, _ in module.named_parameters(remove_duplicate=False)}
        self._forms = {name: _form_of(one) for name, one in _buffers(module, persistent=True)}
        self._is_known, self._has_warned = True, False
        self.begin()

    def begin(self) -> None:
        """Take the current module as the start; each process builds this module before it resumes."""
        if self.is_fixed:
            return
        self._flags = {name: one.requires_grad for name, one in self._module.named_parameters()}
        self._marks = _marks(self._module)

    def go_to_start(self) -> None:
        """Prepare a trained module for another checkpoint: set the flags of the start, and note changed buffers."""
        self._put_back(self._flags, {})
        now = {name: _form_of(one) for name, one in _buffers(self._module, persistent=True)}
        self._reshaped = {name: form for name, form in self._forms.items() if now.get(name, form) != form}
        self._stale = frozenset(name for name, mark in _marks(self._module).items() if self._marks.get(name) != mark)

    def get_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; tensors are not copied."""
        self._is_known, module = True, self._module
        flags = {name: one.requires_grad for name, one in module.named_parameters()}
        buffers, marks = dict(_buffers(module, persistent=False)), _marks(module)
        forms = {name: _form_of(one) for name, one in _buffers(module, persistent=True)}
        return {
            "requires_grad": {name: flag for name, flag in flags.items() if self._flags.get(name, flag) is not flag},
            "buffers": {name: buffers[name] for name in marks if self._marks.get(name, ...) != marks[name]},
            "forms": {name: form for name, form in forms.items() if self._forms.get(name, ...) != form},
        }

    def fit(self, forms: Mapping[str, _Form], module_state: Any) -> None:
        """Give buffers the dtypes and shapes of their values in `module_state`. Call it before these are loaded."""
        known, loaded = dict(_buffers(self._module, persistent=True)), list(_tensors_in(module_state))
        for name, form in {**self._reshaped, **forms}.items():
            if name in known and _form_of(known[name]) == form:
                continue
            fitting = (
                one for key, one in loaded if (name == key or name.endswith(f".{key}")) and _form_of(one) == form
            )
            value = None if form is None else next(fitting, None)
            if form is None or value is not None:  # never allocate from a form alone: it may come from a damaged file
                self._set(name, value, persistent=True)

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state from `get_state`; None for a checkpoint without it.

        Raises:
            CheckpointMismatchError: after `go_to_start`, the checkpoint lacks a buffer that training has changed.
        """
        self._is_known = state is not None
        if state is None:
            return
        self.is_fixed = True
        lost, self._stale, self._reshaped = sorted(self._stale - set(state["buffers"])), frozenset(), {}
        if lost:
            raise CheckpointMismatchError(
                f"the checkpoint lacks {', '.join(lost)}: these buffers are not in state_dict, and had their initial "
                "values when it was written. Training has changed them since. Build the module again, and load the "
                "checkpoint with a new Trainer(module, args) with resume=path in the arguments."
            )
        self._put_back(state["requires_grad"], state["buffers"])

    def get_values(self) -> dict[str, Any]:
        """Return all current flags and values, for a snapshot in memory; empty if the checkpoint had none of them."""
        if not self._is_known:
            return {}
        frozen = [name for name, one in self._module.named_parameters() if not one.requires_grad]
        return {
            "frozen": frozen,
            "buffers": dict(_buffers(self._module, persistent=False)),
            "forms": {name: _form_of(one) for name, one in _buffers(self._module, persistent=True)},
        }

    def put_back(self, values: Mapping[str, Any], module_state: Any) -> None:
        """Restore the values from `get_values`. Call it before the module's state of the same time is loaded."""
        self.fit(values.get("forms", {}), module_state)
        flags, names = {}, set(values.get("frozen", ()))
        if "frozen" in values:
            flags = {name: name not in names for name, _ in self._module.named_parameters()}
        self._put_back(flags, values.get("buffers", {}))

    def _put_back(self, flags: Mapping[str, bool], buffers: Mapping[str, Tensor | None]) -> None:
        for name, parameter in self._module.named_parameters():
            if flags.get(name, parameter.requires_grad) is not parameter.requires_grad:
                parameter.requires_grad_(flags[name])
        known = dict(_buffers(self._module, persistent=False))
        for name, value in buffers.items():
            now = known.get(name)
            if value is None or now is None or _form_of(now) != _form_of(value):
                self._set(name, value, persistent=False)
            elif not same(now, value):
                now.data.copy_(value)

    def _set(self, name: str, value: Tensor | None, *, persistent: bool) -> None:
        """Register a buffer on the device of the buffer that it replaces, or else on that of the parameters."""
        path, _, key = name.rpartition(".")
        owner = dict(self._module.named_modules(remove_duplicate=False)).get(path)
        if owner is None or (key not in owner._buffers and hasattr(owner, key)):
            return
        tensors = (owner._buffers.get(key), *self._module.parameters())
        device = next((one.device for one in tensors if one is not None), None)
        owner.register_buffer(key, value if value is None else value.to(device, copy=True), persistent=persistent)

    def warn_of_additions(self, log: RunLogger) -> None:
        """Warn once about parameters that a new process does not have, so that it cannot load the checkpoint."""
        module = self._module
        names = (without_wrappers(name) for name, _ in module.named_parameters(remove_duplicate=False))
        added = [name for name in names if name not in self._names]
        if not added or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            f"the parameters {', '.join(added[:8])}{', ...' * (len(added) > 8)} were added after "
            f"{type(module).__name__}.__init__. A new process builds the module without them, so it cannot resume from "
            "this checkpoint. Create them in __init__, or override update_state: create the parameters that the state "
            "contains, then call super().update_state(state)."
        )


def without_wrappers(name: str) -> str:
    """Return the name in the state of a parameter or buffer, without the prefix that `torch.compile` inserts."""
    return name.replace("_orig_mod.", "")


def _buffers(module: nn.Module, *, persistent: bool) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the buffers that a checkpoint can hold, with their names; None for a buffer that is None.

    torch 2.13.0: `named_buffers` omits buffers that are None and does not give the persistence.
    """
    for path, owner in module.named_modules():
        for key, value in owner._buffers.items():
            is_plain = type(value) is Tensor and value.layout is torch.strided
            if value is not None and (not is_plain or value.is_meta or value.is_quantized):
                continue
            if (key not in owner._non_persistent_buffers_set) is persistent:
                yield f"{path}.{key}" if path else key, value


def _tensors_in(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, with their keys."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Tensor):
            yield str(key), value
        yield from _tensors_in(value)


def _form_of(value: Tensor | None) -> _Form:
    return None if value is None else (value.dtype, list(value.shape))


def _marks(module: nn.Module) -> dict[str, Any]:
    """Return dtypes, shapes and checksums of the non-persistent buffers."""
    found = dict(_buffers(module, persistent=False))
    sums = iter(checksums(one for one in found.values() if one is not None))
    return {name: None if one is None else (_form_of(one), next(sums)) for name, one in found.items()}
