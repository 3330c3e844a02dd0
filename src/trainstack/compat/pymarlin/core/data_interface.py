"""`DataProcessor` and `DataInterface`, PyMarlin's classes around the preparation of data.

trainstack's trainer does not know them: it asks the module for loaders.
"""

from __future__ import annotations

import itertools
import multiprocessing
from abc import ABC, abstractmethod
from typing import Any

from trainstack.compat.pymarlin.utils.distributed import DistributedPreprocessArguments


class DataProcessor(ABC):
    """One task of data preparation. Define `process`, and `analyze` if the result is to be looked at.

    Args:
        distrib_args: the place of this process, for `multi_process_data`; by default the only machine.
    """

    def __init__(self, distrib_args: DistributedPreprocessArguments | None = None) -> None:
        self.distrib_args = distrib_args

    @abstractmethod
    def process(self, *args: Any) -> Any:
        """Prepare the data and return it."""

    def analyze(self) -> Any:  # noqa: B027 - there may be nothing to look at
        """Look at the result of `process`. Does nothing by default."""

    def process_data(self, *args: Any) -> Any:
        """Call `process`, then `analyze`; returns the result of `process`."""
        result = self.process(*args)
        self.analyze()
        return result

    def multi_process_data(self, *args: Any, process_count: int = 1) -> list[Any]:
        """Call `process` once for each item of the lists among `args`, in `process_count` worker processes.

        Lists are first divided by machine: machine k of n gets every n-th part. An argument that is not a list, or is a
        list of one item, is passed to each call.

        Returns:
            The results of the calls in order. Lists, data sets and other iterables are joined to one list.

        Raises:
            ValueError: no argument is a list, or the lists of this machine differ in length.
        """
        args = tuple(self._share_of_node(one) if isinstance(one, list) else one for one in args)
        lengths = {len(one) for one in args if isinstance(one, list)}
        if not lengths or len(lengths - {1}) > 1:
            raise ValueError(
                f"multi_process_data was given lists of {sorted(lengths)} items. Give at least one list, and lists of "
                "one length or of one item."
            )
        count = max(lengths)
        columns = [(one * count if len(one) == 1 else one) if isinstance(one, list) else [one] * count for one in args]
        with multiprocessing.Pool(processes=process_count) as pool:
            results = pool.starmap(self.process, zip(*columns, strict=True))
        self.analyze()
        is_iterable = [hasattr(one, "__iter__") or hasattr(one, "__getitem__") for one in results]
        if all(is_iterable) and not any(isinstance(one, str) for one in results):
            return list(itertools.chain.from_iterable(results))
        return results

    def _share_of_node(self, items: list[Any]) -> list[Any]:
        place = self.distrib_args
        if place is None or place.node_count == 1 or len(items) == 1:
            return items
        node = place.global_rank // place.local_size if place.node_rank is None else place.node_rank
        size = max(1, len(items) // place.node_count)
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        return list(itertools.chain.from_iterable(parts[node :: place.node_count]))


class DataInterface(ABC):
    """Gives data sets to a module. Define the two methods; `setup_datasets` may prepare them."""

    def setup_datasets(self, *args: Any, **options: Any) -> None:  # noqa: B027 - some have their data at once
        """Make the data sets, before training. Does nothing by default."""

    @abstractmethod
    def get_train_dataset(self, *args: Any, **options: Any) -> Any:
        """The training data."""

    @abstractmethod
    def get_val_dataset(self, *args: Any, **options: Any) -> Any:
        """The validation data."""
