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
    """The state of the training loader over a restart.

    The loop takes no batch before the step that trains on it, so at a step boundary the loader's state is the position
    of training.

    Args:
        log: for warnings about what cannot be exact.
        fast_paths: whether torch's loaders may be read by `fast_batches`.
        split_by_rank: whether each rank's loader gives other samples, so that no rank can use the state of another.
    """

    _generators: LoaderGenerators | None = None

    def __init__(self, log: RunLogger, *, fast_paths: bool = True, split_by_rank: bool = False) -> None:
        self._log, self._fast_paths, self._split_by_rank = log, fast_paths, split_by_rank
        self._loader: Any = None
        self._iterated = self._lasting = self._exhausted = False
        self._pending: dict[str, Any] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint's state waits for its loader."""
        return self._pending is not None

    def attach(self, loader: Any) -> None:
        """See a loader that is not iterated over yet."""
        self._lasting = loader is self._loader
        self._loader, self._iterated = loader, False

    def begin(
        self, loader: Any, generators: LoaderGenerators, *, within: bool, counter: SampleCounter | None = None
    ) -> tuple[Iterator[Any], bool]:
        """The batches of an epoch, and whether they go on from where a checkpoint stood.

        The iterator of `loader` is made and used under `generators`. `counter`, if given, reads a loader without a
        state, and so learns how many samples its batches have.

        Raises:
            CheckpointMismatchError: the loader does not take the checkpoint's state.
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
                generators.update_state(pending["random"])  # of what was read before the checkpoint
            return batches, within
        except Exception as error:  # torchdata asserts; others raise what they like
            workers = getattr(loader, "num_workers", None)
            asked = "" if workers is None else f" (num_workers={workers} now)"
            raise CheckpointMismatchError(
                f"the training loader, a {type(loader).__name__}, does not take back the state it had when the "
                f"checkpoint was written: {type(error).__name__}: {error}. Make it as it was then, with the same "
                f"number of workers{asked}. A loader made anew in each epoch lets a "
                "run go on from a checkpoint at an epoch's end with any number of them."
            ) from error

    def get_state(self, *, within: bool) -> dict[str, Any] | None:
        """What `restore` takes back; None where the next epoch needs nothing of this one's loader.

        A loader that `get_train_dataloader` makes anew in each epoch matters only within its epoch.
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
        """Take the states of all processes' loaders; each takes its own, or the first if there are other processes.

        Raises:
            CheckpointMismatchError: there are other processes, and each loader gave other samples.
        """
        if not states:
            return
        same = len(states) == world.size
        if self._split_by_rank and not same:
            raise CheckpointMismatchError(
                f"the checkpoint has the states of {len(states)} loaders, each of which gave its process its own part "
                f"of the data (data_sharding='loader'), and {world.size} processes cannot share them. Resume with "
                f"{len(states)} processes, or make the loader anew in each epoch and resume from an epoch's end."
            )
        self._pending = states[world.rank] if same else states[0]
        if not same and self._pending is not None:
            self._log.warning(
                f"the checkpoint has the loaders' states of {len(states)} processes; each of the {world.size} goes on "
                "with that of the first."
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
    """The state of `loader` at the beginning of the epoch that follows the one of `pending`.

    An iterator draws from the global generators when it is made. One made of the beginning's state draws what one of
    an unbroken run does; those made on the way there draw in vain.
    """
    with preserve_host_rng():
        loader.load_state_dict(pending["loader"])
        iter(loader)
        if not pending["exhausted"]:  # that was the rest of an epoch that was cut short
            iter(loader)
        return loader.state_dict()


def missing_state_description(loader: Any) -> str:
    """In words, what the state of `loader` does not hold."""
    said = ""
    sampler = getattr(loader, "sampler", None)
    if type(sampler) is RandomSampler and sampler.generator is not None:
        said += (
            " Its RandomSampler draws from a generator of yours, which the state does not hold: after the first epoch "
            "another order would follow. Use torchdata.stateful_dataloader.sampler.RandomSampler."
        )
    if getattr(loader, "num_workers", 0):
        said += " Random numbers that its workers draw are not part of it."
    return said
