"""State of loaders such as torchdata's `StatefulDataLoader` in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import RandomSampler

from trainstack.backends import World
from trainstack.backends.fast_paths import fast_batches
from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.random_state import IsolatedIterator, LoaderGenerators, preserve_host_rng
from trainstack.trainer.core.state import is_stateful
from trainstack.trainer.data.loading import end_workers_with_pass
from trainstack.trainer.data.sample_counts import SampleCounter
from trainstack.trainer.data.torch_classes import draws_first_batch_alone


class LoaderState:
    """Saves and restores the state of the training loader.

    The loop fetches no batch before the step that trains on it, so at a step boundary the loader's state is the
    position of training.

    Args:
        log: logs warnings about an inexact resume.
        fast_paths: whether torch's loaders may be read by `fast_batches`.
        split_by_rank: whether the loaders of the ranks give different samples, so that a rank cannot use the state of
            another.
    """

    _generators: LoaderGenerators | None = None

    def __init__(self, log: RunLogger, *, fast_paths: bool = True, split_by_rank: bool = False) -> None:
        self._log, self._fast_paths, self._split_by_rank = log, fast_paths, split_by_rank
        self._loader: Any = None
        self._iterated = self._lasting = self._exhausted = False
        self._pending: dict[str, Any] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a state of a checkpoint has not been loaded yet."""
        return self._pending is not None

    def attach(self, loader: Any) -> None:
        """Set the loader, before its first iteration."""
        self._lasting = loader is self._loader
        self._loader, self._iterated = loader, False

    def begin(
        self, loader: Any, generators: LoaderGenerators, *, within: bool, counter: SampleCounter | None = None
    ) -> tuple[Iterator[Any], bool]:
        """The batches of an epoch, and whether they begin at the position of a checkpoint.

        The iterator of `loader` is made and used under `generators`. `counter`, if given, reads a loader without a
        state, to count the samples of its batches.

        Raises:
            CheckpointMismatchError: the loader does not load the checkpoint's state.
        """
        self.attach(loader)
        pending, self._pending = self._pending, None
        self._iterated, self._exhausted = True, False
        self._generators = generators
        if not is_stateful(loader):
            make, first_alone = lambda: self._end_workers(self._read(loader, counter)), draws_first_batch_alone(loader)
            return IsolatedIterator(generators, make, first_alone=first_alone), False
        if pending is None:
            return IsolatedIterator(generators, lambda: self._track_batches(iter(loader))), False
        try:
            batches = IsolatedIterator(generators, lambda: self._continue(loader, pending, within))
            if within:
                generators.update_state(pending["random"])  # as after the batches before the checkpoint
            return batches, within
        except Exception as error:  # torchdata uses assertions; other loaders may raise anything
            workers = getattr(loader, "num_workers", None)
            asked = "" if workers is None else f" (num_workers={workers} now)"
            raise CheckpointMismatchError(
                f"the training loader, a {type(loader).__name__}, does not load its state in the checkpoint: "
                f"{type(error).__name__}: {error}. Create the same loader as then, with the same number of "
                f"workers{asked}. If each epoch creates a new loader, a run can resume at the end of an epoch with any "
                "number of workers."
            ) from error

    def get_state(self, *, within: bool) -> dict[str, Any] | None:
        """The state for `restore`; None if the next epoch does not depend on this epoch's loader.

        If `get_train_dataloader` makes a new loader in each epoch, its state is only needed within the epoch.
        """
        if self._pending is not None:
            return self._pending
        if not self._iterated or not is_stateful(self._loader) or not (within or self._lasting):
            return None
        state = self._loader.state_dict()
        if state is None:
            return None
        random = None if self._generators is None else self._generators.get_state()
        return {"loader": state, "exhausted": self._exhausted, "random": random}

    def restore(self, states: Sequence[dict[str, Any] | None] | None, world: World) -> None:
        """Restore this process's loader state, or that of the first if the number of processes has changed.

        Raises:
            CheckpointMismatchError: the number of processes has changed, and each loader gave other samples.
        """
        if not states:
            return
        same = len(states) == world.size
        if self._split_by_rank and not same:
            raise CheckpointMismatchError(
                f"the checkpoint has the states of {len(states)} loaders, each with a part of the data "
                f"(data_sharding='loader'), and {world.size} processes cannot share them. Resume with {len(states)} "
                "processes, or create a new loader in each epoch and resume from the end of an epoch."
            )
        self._pending = states[world.rank] if same else states[0]
        if not same and self._pending is not None:
            self._log.warning(
                f"the checkpoint has the loaders' states of {len(states)} processes; each of the {world.size} uses the "
                "state of the first."
            )

    def _read(self, loader: Any, counter: SampleCounter | None) -> Iterator[Any]:
        if counter is not None:
            return counter.read(loader, fast_paths=self._fast_paths)
        return fast_batches(loader, enabled=self._fast_paths)

    def _continue(self, loader: Any, pending: dict[str, Any], within: bool) -> Iterator[Any]:
        loader.load_state_dict(pending["loader"] if within else _state_for_next_epoch(loader, pending))
        return self._track_batches(iter(loader))

    def _track_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from self._end_workers(batches)
        self._exhausted = True

    def _end_workers(self, batches: Iterator[Any]) -> Iterator[Any]:
        # Persistent workers belong to the user's loader, which may serve another training.
        return end_workers_with_pass(self, batches, persistent=getattr(self._loader, "persistent_workers", False))


def _state_for_next_epoch(loader: Any, pending: dict[str, Any]) -> Any:
    """The state of `loader` at the beginning of the epoch after the one of `pending`.

    An iterator draws from the global generators when it is made. The draws of the iterators in this function are
    undone; the iterator of the new epoch draws the same numbers as in an uninterrupted run.
    """
    with preserve_host_rng():
        loader.load_state_dict(pending["loader"])
        iter(loader)
        if not pending["exhausted"]:  # the first iterator is for the rest of the shortened epoch
            iter(loader)
        return loader.state_dict()


def missing_state_description(loader: Any) -> str:
    """Sentences about random numbers that the state of `loader` does not contain; empty if there are none."""
    said = ""
    sampler = getattr(loader, "sampler", None)
    if type(sampler) is RandomSampler and sampler.generator is not None:
        said += (
            " Its RandomSampler draws from your generator, which is not in the state: after the first epoch the order "
            "would differ. Use torchdata.stateful_dataloader.sampler.RandomSampler."
        )
    if getattr(loader, "num_workers", 0):
        said += " Random numbers of its workers are not in the state."
    return said
