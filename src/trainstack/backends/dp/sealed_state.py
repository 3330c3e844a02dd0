"""`SealedState` notices changes of parameters and buffers that no optimizer has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainstack.backends.dp.tensor_digest import Digest, TensorDigest

_EVERY = 16
"""Steps after which values are compared before the first forward pass too, also where nothing shows a write."""

_ONLY_OPTIMIZERS = (
    "It would carry records into later steps without clipping and noise. Let nothing but the optimizers change "
    "parameters and buffers in a private run. A change that is computed from weights and public values alone, such as "
    "an average of weights, belongs in the block `with trainer.post_processing():`."
)


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
        self._marks: list[tuple[int, int, int]] = []
        self._found: Tensor | bool = False
        self._steps = 0

    def begin_step(self) -> None:
        """A step is about to run its first forward pass."""
        if self._sealed is None:
            self.seal()
            return
        self._steps += 1
        tensors = sealed_tensors(self._module)
        if _marks(tensors) != self._marks or self._steps % _EVERY == 0:
            self._compare(tensors)

    def check(self) -> None:
        """The optimizers are about to step."""
        if self._sealed is None:
            return
        tensors = sealed_tensors(self._module)
        self._compare(tensors)
        if bool(self._found):
            self._refuse_changed(tensors)

    def seal(self) -> None:
        """From here on nothing may change."""
        tensors = sealed_tensors(self._module)
        self._sealed, self._found = self._digest.compute(tensors), False
        self._marks = _marks(tensors)

    def unseal(self) -> None:
        """The library is about to load a state; the next step seals it."""
        self._sealed, self._found = None, False

    @contextmanager
    def post_processing(self) -> Iterator[None]:
        """A block in which parameters and buffers may change. What has changed before it is refused."""
        self.check()
        sealed = self._sealed is not None
        yield
        if sealed:
            self.seal()

    def _compare(self, tensors: Mapping[str, Tensor]) -> None:
        assert self._sealed is not None
        found = self._digest.compute(tensors).differs(self._sealed)
        if found is True:  # known without waiting for a device
            self._refuse_changed(tensors)
        elif isinstance(found, Tensor):
            self._found = found | self._found

    def _refuse_changed(self, tensors: Mapping[str, Tensor]) -> None:
        assert self._sealed is not None
        names = self._sealed.changed(self._digest.compute(tensors))
        which = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        # Without a name, a value was changed for a forward pass and put back.
        self._refuse(
            f"{which or 'a parameter or buffer'} has changed, but not by an optimizer step. {_ONLY_OPTIMIZERS}"
        )
        self.seal()


def sealed_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that are not persistent too; each tensor once.

    Left out are tensors without memory of their own, which a private run cannot train: sparse, quantized and meta
    tensors, lazy ones, and subclasses other than torch's own.
    """
    found: dict[str, Tensor] = {}
    seen = set[int]()
    for path, part in module.named_modules():
        for held in (part._parameters, part._buffers):  # torch 2.13.0; public iterators hide a tensor set in its place
            for key, tensor in held.items():
                if tensor is None or id(tensor) in seen or not _has_plain_memory(tensor):
                    continue
                seen.add(id(tensor))
                found[f"{path}.{key}" if path else key] = tensor
    return found


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def _has_plain_memory(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)


def _marks(tensors: Mapping[str, Tensor]) -> list[tuple[int, int, int]]:
    # torch 2.13.0: `_version` counts writes in place
    return [(id(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors.values()]
