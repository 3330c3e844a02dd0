"""`StateGuard` keeps records out of the state between private steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from trainstack.backends.dp.mechanism import Mechanism
from trainstack.backends.dp.modes.base import Run
from trainstack.backends.dp.sampling import count_records
from trainstack.backends.dp.sealed.attribute_watch import AttributeWatch, probe_gradients
from trainstack.backends.dp.sealed.sample_replay import SampleReplay
from trainstack.backends.dp.sealed.sealed_state import SealedState
from trainstack.backends.single_process import move_to_device
from trainstack.backends.workload import Workload


class StateGuard:
    """The checks of the state between the steps of a private run.

    `SealedState` watches parameters and buffers, `AttributeWatch` plain attributes, and `SampleReplay` samples. Global
    variables, closures, files, and the data set in a loader's workers are out of their sight.

    Args:
        work: of the run.
        mechanism: refuses, notes, and computes gradients.
    """

    def __init__(self, work: Workload, mechanism: Mechanism) -> None:
        self._mechanism = mechanism
        self._sealed = SealedState(work.module, mechanism.refuse)
        self._attributes = AttributeWatch(
            work.module, refuse=partial(mechanism.refuse, released=True), note=self._note_attributes
        )
        assert work.data is not None  # checked at the start
        self._samples = SampleReplay(work.data, refuse=mechanism.refuse, note=mechanism.note)
        mechanism.on_begin = self._samples.begin_epoch
        self._step = 0

    def _note_attributes(self, names: object) -> None:
        self._mechanism.note(f"changes of {names} during training")

    @property
    def keeps_values(self) -> bool:
        """Whether a forward pass has set plain attributes to more than counts and texts."""
        return self._attributes.was_written

    def begin_step(self, step: int) -> None:
        """A micro-batch of global step `step` is about to be run.

        Raises:
            PrivacyError: a parameter or buffer has changed since the last optimizer step, or a sample is another one.
        """
        if step != self._step:
            self._step = step
            self._sealed.begin_step()
            self._samples.begin_step()

    def add(self, step: int, run: Run, batch: Any) -> Any:
        """Let the mechanism add a micro-batch, and watch the attributes; returns its outputs.

        Raises:
            PrivacyError: an attribute carries records into this step, or `train_step` wrote into the state.
        """
        before = self._attributes.begin_step(step, self._bind_gradients(run, batch))
        outputs = self._mechanism.add(run, batch, step)
        self._attributes.end_forward(before)
        return outputs

    def _bind_gradients(self, run: Run, batch: Any) -> Callable[[], Tensor]:
        mode = self._mechanism.mode

        def gradients() -> Tensor:
            moved = move_to_device(batch, mode.trained[0].device)
            return probe_gradients(mode, run, moved, count_records(moved))

        return gradients

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """A block in which the optimizers change the state.

        Raises:
            PrivacyError: something else has changed it since their last step.
        """
        self._sealed.check()
        try:
            yield
        finally:
            self._sealed.seal(same_tensors=True)

    @contextmanager
    def post_processing(self) -> Iterator[None]:
        """A block in which user code changes the state without the help of records.

        Raises:
            PrivacyError: parameters or buffers have changed before it.
        """
        before = self._attributes.marks()
        with self._sealed.post_processing():
            yield
        self._attributes.accept_changes(before)

    def forget(self) -> None:
        """The library is about to load a state; the next step accepts what it finds."""
        self._sealed.unseal()
        self._attributes.forget()
