"""Samplers whose order the library makes: batches of similar lengths, and several combined loaders."""

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

    A trainer shuffles the samples, sorts them by length within windows, cuts the windows into global batches and
    shuffles these. Each rank and each micro-batch gets samples of similar lengths. As with shuffled data, the global
    batches only depend on the seed and the epoch. Validation uses the order of the data set.

    Without a trainer, the sampler gives the windows of an epoch, each sorted with the longest sample first.

    Args:
        lengths: the length of each sample as an integer of at least 0, such as its number of tokens.
        window: the number of samples that are sorted together. A larger window needs less padding, and the batches are
            less random. None for 50 global batches.

    Raises:
        ConfigurationError: `lengths` are not such integers, or `window` is not positive.

    Examples:
        >>> class Line(ts.SupervisedModule):
        ...     def get_train_dataloader(self, sampler, batch_size):
        ...         order = ts.LengthGroupedSampler(
        ...             [1 + index % 7 for index in range(len(data))]
        ...         )
        ...         return DataLoader(data, batch_size=batch_size, sampler=order)
        >>> ts.Trainer(Line(nn.Linear(1, 1), nn.MSELoss(), "sgd", data), args).train()
    """

    def __init__(self, lengths: Sequence[int] | Tensor | np.ndarray[Any, Any], *, window: int | None = None) -> None:
        given = lengths if isinstance(lengths, Tensor) else torch.as_tensor(np.asarray(lengths))
        whole = not (given.is_floating_point() or given.is_complex() or given.dtype is torch.bool)
        if given.dim() != 1 or not len(given) or not whole or int(given.min()) < 0:
            raise ConfigurationError(
                f"LengthGroupedSampler was given lengths of shape {tuple(given.shape)} and type {given.dtype}. Give an "
                "integer of at least 0 for each sample: [len(tokens) for tokens in ...]."
            )
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ConfigurationError(f"window={window!r}: write a whole number of samples, 1 or more, or None.")
        self.lengths, self.window, self._epoch = given.detach().cpu().to(torch.int64), window, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        window = self.window or 2048  # the trainer would use 50 global batches, which are unknown here
        order = DataOrder(length=len(self), global_batch=window, micro_batch=1, lengths=self.lengths, window=window)
        return iter(order.permutation(self._epoch).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` in the next iteration."""
        self._epoch = epoch

    def describe(self) -> str:
        """A description of the order, with a digest of the lengths."""
        digest = hash_text(self.lengths.numpy().tobytes())[:8]  # 32 bits suffice to detect a change
        window = "" if self.window is None else f", sorted in windows of {self.window}"
        return f"grouped by length (lengths {digest}{window})"


def unequal_lengths(given: int, samples: int, where: str = "") -> ModuleContractError:
    """The error if the numbers of samples and of the lengths of a `LengthGroupedSampler` differ."""
    return ModuleContractError(
        f"LengthGroupedSampler was given {given} lengths for a data set{where} of {samples} samples. Give one for each "
        "sample, in the order of the data set. If its length changes between epochs, create the sampler in "
        "get_train_dataloader, and keep the data set as an attribute: set_epoch is called before."
    )


class CombinedOrder(Sampler[int]):
    """The sampler of a loader that combines others. It is sequential, because the data set has the orders.

    Args:
        dataset: its length is the number of positions in an epoch.
        description: a description of the orders.
    """

    def __init__(self, dataset: Sized, description: str) -> None:
        self._dataset, self._description = dataset, description

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def describe(self) -> str:
        """A description of the orders."""
        return self._description
