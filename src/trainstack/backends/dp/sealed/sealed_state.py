"""`SealedState` notices changes of parameters and buffers that no optimizer has made."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainstack.backends.dp.sealed.tensor_digest import Digest, TensorDigest

_EVERY = 16
"""Steps after which values are compared before the first forward pass too, also where nothing shows a write."""

_PASSES = 8
"""One of so many forward passes of a step, drawn at random, is preceded by a comparison of values. In `loop` each would
cost up to 11 % of a pass."""

_ONLY_OPTIMIZERS = (
    "It would carry records into later steps without clipping and noise. Let nothing but the optimizers change "
    "parameters and buffers in a private run. A change that is computed from weights and public values alone, such as "
    "an average of weights, belongs in a Callback, in the block `with trainer.post_processing():`."
)


_Place = tuple[str, dict[str, Any], str, Tensor]
"""The name of a tensor, the dict that holds it, its key there, and the tensor."""

_Holder = tuple[dict[str, Any], str, dict[str, Any], tuple[Any, ...]]
"""The attributes of a module, the name of one that is a dict of tensors or modules, that dict, and its values."""

_HOLDERS = ("_parameters", "_buffers", "_modules")  # torch 2.13.0


class SealedState:
    """The parameters and buffers of a private run, which only optimizers and registered post-processing may change.

    After each optimizer step a digest of all values is kept. Before the next optimizer step the values must have the
    same digest. Between the two are the forward passes, all hooks, callbacks and evaluations. A write that torch counts
    (`_version`), another memory or another tensor also shows before the first forward pass of a step.

    On an accelerator one number is read for each step; the results of the comparisons wait there until then.

    Args:
        module: the user's module, never wrapped.
        refuse: is given the reason; raises an error, or notes that the run is not private.
    """

    def __init__(self, module: nn.Module, refuse: Callable[[str], None]) -> None:
        self._module, self._refuse = module, refuse
        self._digest = TensorDigest()
        self._sealed: Digest | None = None
        self._places: list[_Place] = []
        self._holders: list[_Holder] = []
        self._marks: list[tuple[int, int]] = []
        self._found: Tensor | bool = False
        self._steps = 0

    def begin_step(self) -> None:
        """A step is about to run its first forward pass."""
        if self._sealed is None:
            self.seal()
            return
        self._steps += 1
        moved = any(held.get(key) is not tensor for _, held, key, tensor in self._places)
        if moved or _marks(self._places) != self._marks or self._steps % _EVERY == 0:
            self._compare()

    def begin_pass(self) -> None:
        """A step is about to run another forward pass, one of many: a few of them are checked."""
        if self._sealed is not None and secrets.randbelow(_PASSES) == 0:
            self._compare()

    def check(self) -> None:
        """The optimizers are about to step."""
        if self._sealed is None:
            return
        self._compare()
        if bool(self._found):
            self._refuse_changed()

    def seal(self, *, same_tensors: bool = False) -> None:
        """From here on nothing may change; `same_tensors` saves the search for them."""
        if not same_tensors or not self._places:
            self._find_places()
        self._sealed, self._found = self._digest.compute(_by_name(self._places)), False
        self._marks = _marks(self._places)

    def unseal(self) -> None:
        """The library is about to load a state; the next step seals it."""
        self._sealed, self._found = None, False

    @contextmanager
    def post_processing(self) -> Iterator[None]:
        """A block in which parameters and buffers may change. Changes before it are refused."""
        self.check()
        sealed = self._sealed is not None
        yield
        if sealed:
            self.seal()

    def _compare(self) -> None:
        assert self._sealed is not None
        self._find_places()
        found = self._digest.compute(_by_name(self._places)).differs(self._sealed)
        if found is True:  # known without waiting for a device
            self._refuse_changed()
        elif isinstance(found, Tensor):
            self._found = found | self._found

    def _find_places(self) -> None:
        """Search for the tensors, if any module holds others than in the last search."""
        if not self._holders or not all(_is_unchanged(holder) for holder in self._holders):
            self._places = sealed_places(self._module)
            self._holders = [
                (vars(part), key, held, tuple(held.values()))
                for part in self._module.modules()
                for key in _HOLDERS
                for held in (vars(part)[key],)
            ]

    def _refuse_changed(self) -> None:
        assert self._sealed is not None
        names = self._sealed.changed(self._digest.compute(_by_name(self._places)))
        which = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        # Without a name, a value was changed for a forward pass and put back.
        which = which or "a parameter or buffer"
        self._refuse(f"{which} has changed, but not by an optimizer step. {_ONLY_OPTIMIZERS}")
        self.seal()


def sealed_places(module: nn.Module) -> list[_Place]:
    """The places of parameters and buffers, including those that are not persistent; each tensor once.

    Omitted are tensors without plain memory, which a private run cannot train: sparse, quantized, meta and lazy ones,
    and subclasses that wrap other tensors.
    """
    return [place for place in _all_places(module) if has_memory(place[3])]


def unsealed_names(module: nn.Module) -> list[str]:
    """The names of tensors with values that a digest cannot read."""
    return [
        name
        for name, _, _, tensor in _all_places(module)
        if not has_memory(tensor) and not tensor.is_meta and not is_lazy(tensor)
    ]


def _all_places(module: nn.Module) -> list[_Place]:
    found: list[_Place] = []
    seen = set[int]()
    for path, part in module.named_modules():
        for held in (part._parameters, part._buffers):  # torch 2.13.0; public iterators hide a tensor set in its place
            for key, tensor in held.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                found.append((f"{path}.{key}" if path else key, held, key, tensor))
    return found


def _by_name(places: list[_Place]) -> dict[str, Tensor]:
    return {name: tensor if type(tensor) in _PLAIN else _as_plain(tensor) for name, _, _, tensor in places}


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def _as_plain(tensor: Tensor) -> Tensor:
    """The same memory, past the functions of a subclass."""
    with torch._C.DisableTorchFunctionSubclass():  # torch 2.13.0
        return tensor.detach().as_subclass(Tensor)


def _is_unchanged(holder: _Holder) -> bool:
    attributes, key, held, values = holder
    return attributes.get(key) is held and len(held) == len(values) and all(map(is_, held.values(), values))


def has_memory(tensor: Tensor) -> bool:
    """Whether the bits of a tensor can be read: it is none of torch's sparse, quantized, meta and lazy tensors."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or is_lazy(tensor):
        return False
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # a subclass without memory, such as DTensor
        return False


def _marks(places: list[_Place]) -> list[tuple[int, int]]:
    # torch 2.13.0: `_version` counts writes in place
    return [(tensor.data_ptr(), tensor._version) for _, _, _, tensor in places]
