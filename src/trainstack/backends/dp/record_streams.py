"""`RecordStreams`, random numbers of torch that belong to records and not to places in a batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainstack.backends.dp.modes.base import Run, Unsupported
from trainstack.backends.dp.random_functions import COMPOSED, HANDLERS, UNHANDLED, drops_between_layers
from trainstack.backends.random_streams import RandomStreams

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64, whose products wrap around."""
    x = (x ^ (x >> 30) & (1 << 34) - 1) * _FIRST
    x = (x ^ (x >> 27) & (1 << 37) - 1) * _SECOND
    return x ^ (x >> 31) & (1 << 33) - 1


class RecordStreams(TorchFunctionMode):
    """While it is active, the random functions of torch give each record numbers of a separate stream.

    The numbers of record i in step t are F(seed, t, i, number of the call). So if a record is left out, the numbers of
    the others stay, in every gradient mode: the effect of a record can be measured with dropout on. In modes that
    run records one by one or under `vmap`, all numbers are the record's own. In the others a tensor whose first
    dimension is a multiple of the records is taken as theirs, in order; any other has numbers that all share.

    The numbers follow from `seed` and are not private.

    Args:
        seed: of all streams.

    Attributes:
        calls: the number of calls of the current forward pass. Gradient checkpointing resets it.
    """

    calls: int

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._streams = RandomStreams.from_seed(seed)
        self._keys = torch.zeros(1, dtype=torch.int64)
        self._shared = 0
        self.calls = 0

    def attach(self, run: Run, batch: Any, index: Tensor, step: int) -> tuple[Run, Any]:
        """`run` and a batch for a gradient mode, in which the records carry the keys of their streams.

        Args:
            run: see `Run`.
            batch: of the records `index`.
            index: the numbers of the batch's records in the dataset, int64, `(records,)`.
            step: the global step, from 1.
        """
        device = next((leaf.device for leaf in _tensors(batch)), torch.device("cpu"))
        keys = torch.tensor([self._streams.number(step, i) for i in index.tolist()], device=device)
        shared = self._streams.number(step, "shared")

        def run_with_keys(model: Any, carried: Any) -> Any:
            batch, self._keys = carried
            self._shared, self.calls = shared, 0
            return run(model, batch)

        return run_with_keys, (batch, keys)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, *args, **kwargs)
        if func in COMPOSED:
            with self:
                return COMPOSED[func](*args, **kwargs)
        if func in UNHANDLED or drops_between_layers(func, args):
            raise Unsupported(
                f"{getattr(func, '__name__', func)} draws random numbers that cannot be drawn for each record alone, "
                "as debug_seed and audits need it. Use nn.Dropout between layers, or torch.rand and torch.randn."
            )
        return func(*args, **kwargs)

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1), of the shape, the dtype and on the device of `like`."""
        return self._uniform(like).to(like.dtype)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers, by the method of Box and Muller."""
        radius = (-2.0 * torch.log1p(-self._uniform(like))).sqrt()
        return (radius * torch.cos(2.0 * math.pi * self._uniform(like))).to(like.dtype)

    def _uniform(self, like: Tensor) -> Tensor:
        """float64 with 53 random bits for float64, else float32 with 24: no rounding leads to 1."""
        self.calls += 1
        records, shape = len(self._keys), like.shape
        keys = self._keys.to(like.device)
        if records > 1 and (not shape or shape[0] % records):
            keys, records = torch.full((1,), self._shared, device=like.device), 1
        numbers = torch.arange(like.numel() // records, device=like.device)
        bits = _mixed(_mixed(keys + _wrapped(self.calls * _GOLDEN))[:, None] + numbers * _GOLDEN).reshape(shape)
        if like.dtype is torch.float64:
            return ((bits >> 11) & (1 << 53) - 1).double() * 2.0**-53
        return ((bits >> 40) & (1 << 24) - 1).float() * 2.0**-24


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _tensors(batch: Any) -> list[Tensor]:
    from trainstack.backends.dp.torch_names import pytree

    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
