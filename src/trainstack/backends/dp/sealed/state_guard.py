"""`StateGuard` keeps records out of the state between private steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from trainstack.backends.dp.mechanism import Mechanism
from trainstack.backends.dp.modes.base import Run
from trainstack.backends.dp.sampling import count_records
from trainstack.backends.dp.sealed.attribute_watch import Attributes, AttributeWatch, Probe, probe_gradients
from trainstack.backends.dp.sealed.collation import CollationCheck
from trainstack.backends.dp.sealed.option_watch import OptionWatch
from trainstack.backends.dp.sealed.plain_state import Place
from trainstack.backends.dp.sealed.sample_replay import SampleReplay
from trainstack.backends.dp.sealed.sealed_state import SealedState, unsealed_names
from trainstack.backends.dp.sealed.snapshot import Snapshot
from trainstack.backends.single_process import move_to_device
from trainstack.backends.workload import Workload


class StateGuard:
    """The checks of the state between the steps of a private run.

    `SealedState` watches parameters and buffers, `AttributeWatch` plain attributes, `OptionWatch` options of
    optimizers, `SampleReplay` samples, and `CollationCheck` batches. A `Snapshot` gives plain attributes that a forward
    pass has set their former values back before the next one, of the same step or of a later one, and while schedules
    step. None of them can see global variables, closures, files, or the data set in a loader's workers.

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
        unsealed = unsealed_names(work.module)
        if unsealed:
            self._note_attributes(Attributes(names=tuple(unsealed)))
        self._options = OptionWatch(work.optimizers, mechanism.note)
        assert work.data is not None  # checked at the start
        self._total_steps = work.data.total_steps
        self._samples = SampleReplay(work.data, refuse=mechanism.refuse, note=mechanism.note)
        self._collation = CollationCheck(refuse=partial(mechanism.refuse, released=True), note=mechanism.note)
        mechanism.sampling.look = self._collation.look
        mechanism.on_begin = self._samples.begin_epoch
        self._step = 0
        self._snapshot = Snapshot(work.module)
        self._touched, self._written = set[Place](), dict[Place, Any]()  # since the step before began; in this step
        self._is_fresh = True  # nothing of the user has run since the snapshot
        self._gradients: Probe | None = None

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
            self._options.check()
            changed = self._begin_part()
            accepts = self._attributes.begin_step()
            self._sealed.begin_step()
            self._touched = set() if accepts else changed
        else:
            self._begin_part()

    def add(self, step: int, run: Run, batch: Any) -> Any:
        """Let the mechanism add a micro-batch, and watch the attributes; returns its outputs.

        Raises:
            PrivacyError: `train_step` wrote into the state.
        """
        mode = self._mechanism.mode
        mode.begin_pass = self._begin_pass
        try:
            outputs = self._mechanism.add(run, batch, step)
        finally:
            del mode.begin_pass  # probes begin with other values
        self._written = self._snapshot.values(self._snapshot.changed())
        self._attributes.end_forward(self._written)
        self._gradients = self._bind_gradients(run, batch)
        if self._collation.is_waiting:
            with self._attributes.unchanged():
                self._collation.compare(lambda one: self._bind_gradients(run, one)(0))
        return outputs

    def release(self, work: Workload) -> Tensor:
        """Call `Mechanism.release`, unless an attribute has carried records from one forward pass into another.

        Raises:
            PrivacyError: it has; nothing is released.
        """
        self._samples.check()
        gradients, self._gradients = self._gradients, None
        if gradients is not None:
            touched = self._touched | self._snapshot.changed()
            self._attributes.check(gradients, touched, is_last=self._step == self._total_steps)
        return self._mechanism.release(work)

    def end_borrowed(self) -> None:
        """A forward pass on a record that is not in this sample has ended; nothing of it is kept."""
        self._snapshot.restore()

    def _begin_pass(self) -> None:
        """Nothing that one forward pass of a step has left in an attribute is there in the next one."""
        if not self._is_fresh:
            self._snapshot.restore()
            self._sealed.begin_pass()
        self._is_fresh = False

    def _begin_part(self) -> set[Place]:
        """A micro-batch begins with the state of the previous one, of any step, except for values set by hooks.

        Returns:
            the attributes that hooks have set.
        """
        self._is_fresh = True
        if not (changed := self._snapshot.changed()):
            return set()
        values, written = self._snapshot.values(changed), self._written
        by_hooks = {at: value for at, value in values.items() if value is not written.get(at, self)}
        self._snapshot.restore(by_hooks)
        self._written = {}
        if by_hooks:
            self._snapshot = self._snapshot.with_values(by_hooks)
        return set(by_hooks)

    def _renew(self) -> set[Place]:
        """Return the attributes that have changed since the snapshot, and replace it by a snapshot of now."""
        changed = self._snapshot.changed()
        if changed:
            self._snapshot = self._snapshot.renewed(changed)
        return changed

    def _bind_gradients(self, run: Run, batch: Any) -> Probe:
        mode, telemetry = self._mechanism.mode, self._mechanism.telemetry

        def gradients(number: int) -> list[Tensor]:
            moved = move_to_device(batch, mode.trained[0].device)
            records = count_records(moved)
            return probe_gradients(mode, telemetry, run, moved, records, max(0, records - 1 - number))

        return gradients

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """A block in which the optimizers change the state.

        Raises:
            PrivacyError: something else has changed it since their last step.
        """
        self._sealed.check()
        try:
            with self._options.change():
                yield
        finally:
            self._sealed.seal(same_tensors=True)

    @contextmanager
    def schedulers_step(self) -> Iterator[None]:
        """A block in which registered schedulers change options of optimizers, and see nothing of forward passes."""
        with self._snapshot.installed(), self._options.change():
            yield

    @contextmanager
    def post_processing(self) -> Iterator[None]:
        """A block in which user code changes the state without the help of records.

        Raises:
            PrivacyError: parameters or buffers have changed before it.
        """
        self._touched |= self._begin_part() | self._renew()
        with self._sealed.post_processing(), self._options.change():
            yield
        self._attributes.accept_changes(self._renew())

    def forget(self) -> None:
        """The library is about to load a state, which the next step accepts."""
        self._sealed.unseal()
        self._options.forget()
        self._attributes.forget()
        self._written = {}
