"""`StepVerifier` runs some global steps twice from the same state and compares the bits of losses and gradients.

Both runs use the same weights: the second run comes before clipping and the update. It calls `train_step` through the
same layers as the first run, in the same number of passes on all ranks, and calls no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from trainstack.backends import Borrowed, Workload
from trainstack.backends.dp.sealed.plain_state import SCALARS, Held, owners_of
from trainstack.backends.dp.sealed.snapshot import Snapshot
from trainstack.backends.generator_search import find_generators
from trainstack.backends.losses import find_loss
from trainstack.errors import ConfigurationError, ReplayMismatchError, annotate
from trainstack.stage import Stage
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.borrowing import muted_log
from trainstack.trainer.core.order import mix
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.run.pass_record import (
    PassState,
    PassVerbs,
    RecordedPass,
    SetAside,
    StepRecord,
    copy_batch,
    find_differing,
)
from trainstack.trainer.torch_settings import reuses_memory

RunPasses = Callable[[StepBatches, Workload], list[Tensor | float]]

_CHOICE = 0x7265706C6179  # "replay" in ASCII, a key that no other seed of the run uses


def is_chosen(seed: int, step: int, share: float) -> bool:
    """Whether `step` belongs to the `share` of steps that are run twice. The choice is the same on all ranks, and uses
    no generator."""
    return mix(seed, _CHOICE, step) < share * 2**64  # `mix` is uniform over 64 bits


def make_verifier(context: RunContext, work: Workload, makes_updates: bool) -> StepVerifier | None:
    """Make the verifier, if the arguments ask for one.

    Raises:
        ConfigurationError: the steps of the run cannot be run twice.
    """
    share = context.args.verify_replay
    if not share:
        return None
    refusals = [(layer.name, layer.refuses_replay) for layer in context.stack.layers() if layer.refuses_replay]
    if refusals:
        name, reason = refusals[0]
        raise ConfigurationError(f"verify_replay={share} with the layer {name!r}: {reason}. Remove verify_replay.")
    if makes_updates:
        raise ConfigurationError(
            f"verify_replay={share} with a train_step that yields, or an optimizer that evaluates a closure: the "
            "passes of such a step depend on updates within it. Remove verify_replay."
        )
    shares_memory = work.gradients_reduced_by is not None or reuses_memory(context.module, context.args.compile)
    return StepVerifier(context, share, context.args.on_replay_mismatch, shares_memory=shares_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The difference between the two runs of a step, on one rank.

    Attributes:
        quantity: "loss" if a loss differs, else "gradient".
        micro_batch: the first micro-batch whose loss differs, counted from 0; None if none does.
        parameter: the name of the first parameter whose gradient differs; None if none does.
        count: the number of losses and gradients that differ.
    """

    quantity: Literal["loss", "gradient"]
    micro_batch: int | None
    parameter: str | None
    count: int


class StepVerifier:
    """Runs the chosen steps of a training twice.

    Args:
        context: the context of the run.
        share: the share of the global steps that are run twice, between 0 and 1.
        on_mismatch: as `TrainerArguments.on_replay_mismatch`.
        shares_memory: whether a backward pass may write to the memory of the previous gradients.
    """

    def __init__(self, context: RunContext, share: float, on_mismatch: str, *, shares_memory: bool) -> None:
        self._context, self._state, self._share = context, context.state, share
        self._on_mismatch, self._shares_memory = on_mismatch, shares_memory
        self._record: StepRecord | None = None  # of the current step, if it is chosen
        self._written: dict[int, Tensor] = {}  # tensors that passes write to, such as averages of weights
        self._generators, self._owners = list[Any](), dict[str, Held]()
        self._attributes: Snapshot | None = None  # at the last search
        self._has_warned = False

    def recording(self, verbs: PassVerbs) -> PassVerbs:
        """Wrap `verbs`, so that they record the passes of a chosen step."""
        self._verbs = verbs

        @contextmanager
        def recorded(record: StepRecord, work: Workload, last: bool) -> Iterator[None]:
            record.last = last
            with verbs.accumulate(work, last):
                yield
                if last and record.gradients is None:
                    record.end_pass(work)

        def accumulate(work: Workload, last: bool) -> AbstractContextManager[Any]:
            record = self._record
            return verbs.accumulate(work, last) if record is None else recorded(record, work, last)

        def forward(work: Workload, stage: Stage, batch: Any, step: int) -> Any:
            record = self._record
            if record is not None:
                kept, before = copy_batch(batch), self._keep(is_first=not record.passes)
                one = RecordedPass(kept, type(batch) is Borrowed, record.last, record.scale, before)
                record.begin(one, work)
            return verbs.forward(work, stage, batch, step)

        def backward(work: Workload, loss: Tensor, weight: float) -> None:
            record = self._record
            if record is None:
                verbs.backward(work, loss, weight)
                return
            one = record.passes[-1]
            one.loss, one.weight = loss.detach().clone(), weight
            verbs.backward(work, loss, weight)
            record.end_pass(work)

        def scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
            record = self._record
            if record is None:
                verbs.scale(parameters, factor)
                return
            params = list(parameters)
            record.check_gradients(params)
            verbs.scale(params, factor)
            record.note_gradients(params)
            record.scale *= factor

        return PassVerbs(accumulate, forward, backward, scale)

    def verifying(self, run: RunPasses) -> RunPasses:
        """Wrap `run`, so that it runs the passes of chosen steps twice. `run` must use the verbs of `recording`.

        Raises:
            ReplayMismatchError: the two runs differ, and `on_replay_mismatch` is "stop".
        """

        def run_twice(step_batches: StepBatches, work: Workload) -> list[Tensor | float]:
            step = self._state.global_step + 1
            if not is_chosen(self._state.seed, step, self._share):
                return run(step_batches, work)
            self._search()
            self._record = StepRecord()
            try:
                losses = run(step_batches, work)
            finally:
                record, self._record = self._record, None
            self._verify(record, work, step)
            return losses

        return run_twice

    def _search(self) -> None:
        """Find the objects with state, if there may be new ones. The search takes longer than a small step."""
        module, known = self._context.module, self._attributes
        if known is not None:
            new = known.values(known.changed()).values()
            if all(isinstance(value, (*SCALARS, Tensor, np.ndarray)) for value in new):
                return
        self._generators = list(find_generators(module, **self._context.events.callbacks).by_path.values())
        self._owners = owners_of(module)
        self._attributes = Snapshot(module, self._owners)

    def _keep(self, *, is_first: bool) -> PassState:
        """The current state. After the first pass the owners are searched again, because a pass may create objects."""
        owners = self._owners if is_first else None
        return PassState(self._context, self._generators, owners, self._written.values())

    def _verify(self, record: StepRecord, work: Workload, step: int) -> None:
        """Run the passes of `record` again, if all ranks can, and report a difference."""
        comm = work.world.comm
        if any(comm.gather(not self._is_repeatable(record, work, step), "whether a step can be run twice")):
            return
        found = self._repeat(record, work, step)
        each = comm.gather(None if found is None else asdict(found), "the second run of a step")
        differing = [(rank, Mismatch(**one)) for rank, one in enumerate(each) if one is not None]
        if differing:
            # A wrong gradient on one rank makes the sum wrong on all ranks, so prefer a loss: it shows the rank.
            rank, first = min(differing, key=lambda one: (one[1].quantity != "loss", one[0]))
            self._report(step, rank, first, sum(one.count for _, one in differing))

    def _is_repeatable(self, record: StepRecord, work: Workload, step: int) -> bool:
        """Whether the step has not changed the weights, and has run its last pass.

        Raises:
            ConfigurationError: a second backward pass would move weights.
        """
        names = {id(p): name for name, p in work.module.named_parameters()}
        hooked = [p for p in work.params.all if getattr(p, "_post_accumulate_grad_hooks", None)]  # torch 2.13.0
        if hooked:
            raise ConfigurationError(
                f"verify_replay={self._share}, and {names.get(id(hooked[0]), 'a parameter')!r} has a hook that is "
                "called when its gradient is accumulated, such as an optimizer that steps in the backward pass. A "
                "second backward pass would call it again. Remove verify_replay or the hook."
            )
        optimized = {id(p) for p in work.params.optimized if p.requires_grad}
        own = sorted(names.get(id(one), "a parameter") for one in record.moved if id(one) in optimized)
        new = {id(one): one for one in record.moved if id(one) not in {*optimized, *self._written}}
        self._written |= new  # from the next chosen step on
        if own and not self._has_warned:
            self._has_warned = True
            self._context.log.warning(
                f"verify_replay: global step {step} has changed {own[0]!r} within train_step or a hook, and was not "
                "run a second time. Such steps are not verified."
            )
        return not new and not own and bool(record.passes) and record.last

    def _repeat(self, record: StepRecord, work: Workload, step: int) -> Mismatch | None:
        """Run the passes again, restore all states, and return the difference, or None."""
        state = self._state
        micro_batch, borrowed = state.micro_batch, state.borrowed
        now = self._keep(is_first=len(record.passes) == 1)
        aside = SetAside(work.params.all, shares_memory=self._shares_memory)
        try:
            with muted_log(work.module, state):
                losses = [self._run_again(one, position, work, step) for position, one in enumerate(record.passes)]
            return self._compare(record, losses, work)
        except Exception as error:
            annotate(error, f"raised in the second run of global step {step}, for verify_replay")
            raise
        finally:
            state.micro_batch, state.borrowed = micro_batch, borrowed
            now.restore()
            aside.put_back()

    def _run_again(self, one: RecordedPass, position: int, work: Workload, step: int) -> Tensor | None:
        verbs, state = self._verbs, self._state
        one.before.restore()
        state.micro_batch, state.borrowed = position, one.is_borrowed
        if one.scale != 1.0:
            verbs.scale(work.params.all, one.scale)
        with verbs.accumulate(work, one.last):
            outputs = verbs.forward(work, Stage.TRAIN, Borrowed(one.batch) if one.is_borrowed else one.batch, step)
            if one.loss is None:
                return None
            loss = find_loss(outputs)
            value = loss.detach().clone()
            verbs.backward(work, loss, one.weight)
        return value

    def _compare(self, record: StepRecord, losses: list[Tensor | None], work: Workload) -> Mismatch | None:
        pairs: dict[Any, tuple[Tensor | None, Tensor | None]] = {
            ("loss", position): (one.loss, again)
            for position, (one, again) in enumerate(zip(record.passes, losses, strict=True))
        }
        if record.gradients is not None:
            pairs |= {id(p): (record.gradients.get(id(p)), p.grad) for p in work.params.all}
        found = find_differing(pairs)
        if not found:
            return None
        names = {id(p): name for name, p in work.module.named_parameters()}
        wrong = [key[1] for key in found if isinstance(key, tuple)]
        parameters = [names.get(key, "a parameter of an optimizer") for key in found if not isinstance(key, tuple)]
        return Mismatch(
            quantity="loss" if wrong else "gradient",
            micro_batch=wrong[0] if wrong else None,
            parameter=parameters[0] if parameters else None,
            count=len(found),
        )

    def _report(self, step: int, rank: int, found: Mismatch, count: int) -> None:
        context, size = self._context, self._context.world.size
        name = "train/replay_mismatches"
        message = _describe(step, rank, found, size)
        if self._on_mismatch == "stop":
            raise ReplayMismatchError(message, step=step, rank=rank, quantity=found.quantity, parameter=found.parameter)
        context.history.update_metric(name, count, step=step, epoch=self._state.epoch)
        if self._on_mismatch == "warn":
            context.log.warning(message)


def _describe(step: int, rank: int, found: Mismatch, size: int) -> str:
    where = f" on rank {rank}" if size > 1 else ""
    parts = []
    if found.micro_batch is not None:
        parts.append(f"the loss of micro-batch {found.micro_batch}{where}")
    if found.parameter is not None:
        of_all = ", summed over all ranks" if size > 1 else ""
        parts.append(f"the gradient of {found.parameter!r}{of_all}")
    return (
        f"verify_replay: global step {step} was run twice from the same state, and {' and '.join(parts)} "
        f"differ{'' if len(parts) > 1 else 's'}. Either the hardware makes errors, or the step is not deterministic: "
        "it uses such an operation, the time, or random numbers without a seed. `trainstack doctor --determinism "
        "FILE.py:MODULE` finds the cause; docs/determinism.md has the settings."
    )
