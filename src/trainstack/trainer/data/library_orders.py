"""Samplers that ask the library for an order: batches of like lengths, several loaders side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.trainer.core.fingerprints import hash_text
from trainstack.trainer.core.order import DataOrder


class LengthGroupedSampler(Sampler[int]):
    """A sampler for training data of different lengths, such as texts: its batches need little padding.

    A trainer makes the order itself: it shuffles the samples, sorts them by length within windows, cuts the windows
    into global batches and shuffles those. Each rank and each micro-batch gets samples of like lengths. As with
    shuffled data the global batches depend on the seed and the epoch alone. Validation keeps the order of the data set.

    Outside of a trainer it gives the windows of an epoch, each sorted with the longest sample first.

    Args:
        lengths: of the samples, one whole number for each, such as its tokens.
        window: samples that are sorted together: the more, the less padding, and the less random the batches. None for
            50 global batches.

    Raises:
        ConfigurationError: `lengths` are no whole numbers, or `window` is not positive.
    """

    def __init__(self, lengths: Sequence[int] | Tensor | np.ndarray[Any, Any], *, window: int | None = None) -> None:
        given = lengths if isinstance(lengths, Tensor) else torch.as_tensor(np.asarray(lengths))
        whole = not (given.is_floating_point() or given.is_complex() or given.dtype is torch.bool)
        if given.dim() != 1 or not len(given) or not whole or int(given.min()) < 0:
            raise ConfigurationError(
                f"LengthGroupedSampler was given lengths of shape {tuple(given.shape)} and type {given.dtype}. Give a "
                "whole number, 0 or more, for each sample: [len(tokens) for tokens in ...]."
            )
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ConfigurationError(f"window={window!r}: write a whole number of samples, 1 or more, or None.")
        self.lengths, self.window, self._epoch = given.detach().cpu().to(torch.int64), window, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        window = self.window or 2048
        order = DataOrder(length=len(self), global_batch=window, micro_batch=1, lengths=self.lengths, window=window)
        return iter(order.permutation(self._epoch).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration give the order of `epoch`."""
        self._epoch = epoch

    def describe(self) -> str:
        """The order in words, with a digest of the lengths."""
        digest = hash_text(self.lengths.numpy().tobytes())[:8]
        window = "" if self.window is None else f", sorted in windows of {self.window}"
        return f"grouped by length (lengths {digest}{window})"


def unequal_lengths(given: int, samples: int, where: str = "") -> ModuleContractError:
    """The error for a data set that has another number of samples than `LengthGroupedSampler` was given lengths."""
    return ModuleContractError(
        f"LengthGroupedSampler was given {given} lengths for a data set{where} of {samples} samples. Give one for each "
        "sample, in the order of the data set. If its length changes by epoch, make the sampler in "
        "get_train_dataloader, and keep the data set as an attribute: set_epoch is called before."
    )


class CombinedOrder(Sampler[int]):
    """The sampler of a loader that combines others, whose orders the data set follows.

    Args:
        dataset: whose length is the number of positions in an epoch.
        description: the orders in words.
    """

    def __init__(self, dataset: Sized, description: str) -> None:
        self._dataset, self._description = dataset, description

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def describe(self) -> str:
        """The orders in words."""
        return self._description
