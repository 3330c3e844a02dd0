"""`Mechanism` turns sums of clipped per-record gradients into noisy gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.dp.budget import Accountant
from trainstack.backends.dp.clipping import AdaptiveClipper
from trainstack.backends.dp.epsilon import Entry
from trainstack.backends.dp.forward_randomness import ForwardRandomness
from trainstack.backends.dp.initial_weights import origin_in_process
from trainstack.backends.dp.modes.base import GradientMode, Run, shorten, split_like
from trainstack.backends.dp.modes.probing import WriteDetector
from trainstack.backends.dp.randomness import Randomness
from trainstack.backends.dp.sampling import PoissonSampling, count_records
from trainstack.backends.dp.statement import private_statement
from trainstack.backends.dp.telemetry import Telemetry
from trainstack.backends.privacy_statement import PrivacyStatement
from trainstack.backends.processes.world import World
from trainstack.backends.single_process import move_to_device
from trainstack.backends.trained_before import trained_before
from trainstack.backends.workload import Workload
from trainstack.errors import CheckpointMismatchError, PrivacyError, annotate

_log = logging.getLogger("trainstack")

_FORMAT = 2
"""Of the layer's state. States without one are of versions that stored states of generators."""

_ALONE = (
    "train_step runs on each record separately, mostly under torch.func.vmap. Tensors of one call cannot be kept for "
    "another, in buffers, attributes or lists."
)

_CARRIED = (
    "an attribute that changed on another process carried records into later steps. The error of that process names it."
)

_WRITES = ("inplace arithmetic", "may have escaped from inside")
"""How functorch names a write into a tensor from outside of the call, and the later use of one (torch 2.13.0)."""


class Mechanism:
    """The Poisson-subsampled Gaussian mechanism of one run, on all its processes.

    Args:
        args: of the run.
        accountant: is charged before the noise of a step is drawn.
        mode: gives the sums of clipped gradients.
        randomness: of the noise.
        forward_randomness: of the random numbers in `train_step`.
        sampling: draws the records.
        world: this process's place; the main process draws the noise.

    Attributes:
        telemetry: metrics of records that are released with the gradients.
    """

    args: DifferentialPrivacyArguments
    accountant: Accountant
    mode: GradientMode
    sampling: PoissonSampling
    telemetry: Telemetry

    def __init__(
        self,
        *,
        args: DifferentialPrivacyArguments,
        accountant: Accountant,
        mode: GradientMode,
        randomness: Randomness,
        forward_randomness: ForwardRandomness,
        sampling: PoissonSampling,
        world: World,
    ) -> None:
        self.args, self.accountant, self.mode, self.sampling = args, accountant, mode, sampling
        self._randomness, self._world = randomness, world
        self._released = 0
        self._carried: str | None = None  # a refusal of which the other processes do not know yet
        self._is_noted = False
        self.on_begin: Callable[[], None] = lambda: None
        self._forward_randomness = forward_randomness
        self._write_detector = WriteDetector(mode.module)
        self.telemetry = Telemetry(args, accountant.plan, mode.clipper, one_by_one=mode.one_by_one)
        mode.observer = self.telemetry.observe if self.telemetry.is_observing else None

    def add(self, run: Run, batch: Any, step: int) -> Any:
        """Add a micro-batch to global step `step`; returns the outputs of `train_step` without their graph.

        Raises:
            PrivacyError: `train_step` wrote into a parameter or buffer, which then learns without noise.
        """
        batch = move_to_device(batch, self._world.device)
        self._write_detector.begin()
        records = count_records(batch)
        run, batch = self._forward_randomness.begin(run, batch, records, step)
        with self._forward_randomness:
            try:
                outputs = self.mode.add(run, batch, records)
            except RuntimeError as error:
                self._explain(error)
                raise
        self.telemetry.check_observed(records)
        self._refuse_writes()
        return outputs

    def _refuse_writes(self) -> None:
        changed = self._write_detector.changed()
        if changed is not None:
            self.refuse(
                f"{changed} changes in a forward pass: it would learn from records without clipping and noise. Let "
                "nothing but optimizers change parameters and buffers in a private run."
            )

    def _explain(self, error: RuntimeError) -> None:
        """Explain why `train_step` failed although it works outside of private training."""
        if not isinstance(error, torch.OutOfMemoryError):
            self._refuse_writes()
        if any(words in str(error) for words in _WRITES):
            raise PrivacyError(
                "train_step writes values of a record into a tensor that it did not compute from that record, such as "
                f"a buffer, a queue or a tensor in an attribute. In a private run {_ALONE} If the tensor is made in "
                f"the same call, build it with torch.cat or torch.stack. The error was: {shorten(error)}"
            ) from error
        annotate(error, f"In a private run {_ALONE}")

    def refuse(self, reason: str, *, released: bool = False) -> None:
        """End the run for a reason that voids the guarantee; with `on_unsafe="report"` note it and continue.

        Args:
            reason: the first sentence goes into the statement.
            released: whether a step that this concerns has been released already. The statement then has the reason
                also where the run ends.

        Raises:
            PrivacyError: always without `on_unsafe="report"`, and on processes other than the main one. There, with
                `released`, `release` raises it on all processes: the main one has the ledger.
        """
        if released and not self._world.is_main:
            self._carried = reason
            return
        report, known = self.args.on_unsafe == "report" and self._world.is_main, self.accountant.overrides
        try:
            if report or released:
                self.accountant.void(reason.partition(". ")[0])
        finally:
            if not report:
                raise PrivacyError(reason)
        if self.accountant.overrides != known:
            _log.warning("the run is not private any more: %s", reason)

    def note(self, text: str) -> None:
        """Add a line to the statement: the guarantee does not cover `text`.

        The ledger has it, and no checkpoint: another process makes the same checks, and notes its own findings.
        """
        self.accountant.note(text)

    def discard(self) -> None:
        """Forget the sums of an interrupted step: a record would count twice in the next one.

        Steps are about to be made; `on_begin` is called.
        """
        self.on_begin()
        self._forward_randomness.discard()
        self.telemetry.pop_sums(self.mode.pop_sums()[0].device)

    def release(self, work: Workload) -> Tensor:
        """End the step: charge it, add noise to the sum over all processes, and set the gradients.

        Returns:
            The joint L2 norm of the gradients, 0-dim.

        Raises:
            PrivacyBudgetError: the step would exceed the budget; nothing is released.
            PrivacyError: a process has found that earlier steps carried records into this one.
        """
        self.check_parameters(work)
        self._forward_randomness.discard()  # an audit makes the same step again
        self.accountant.charge()
        self._released += 1
        sums, gradients = self.mode.pop_flat_sums()
        size, released = len(sums), self.telemetry.pop_sums(sums.device)
        flat = torch.cat([sums, released]) if len(released) else sums
        if self._world.is_main:
            self._add_noise(flat)
        flat = self._sum_over_processes(flat)
        flat *= 1.0 / self.accountant.plan.expected_batch_size  # a division takes twice as long
        if flat is not sums:
            gradients = split_like(flat, self.mode.trained)
        for parameter in work.optimized_params:
            parameter.grad = None  # only gradients released here may reach an optimizer
        for parameter, gradient in zip(self.mode.trained, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self.telemetry.release(flat[size:])
        norm: Tensor = torch.linalg.vector_norm(flat[:size])
        return norm

    def _sum_over_processes(self, flat: Tensor) -> Tensor:
        """The sum; one more number tells all processes that one of them refuses the step."""
        comm = self._world.comm
        if self._world.size == 1:
            comm.all_reduce_(flat)
            return flat
        carried, self._carried = self._carried, None
        flat = torch.cat([flat, flat.new_tensor([0.0 if carried is None else 1.0])])
        comm.all_reduce_(flat)
        if float(flat[-1]) > 0:
            if self._world.is_main:
                self.refuse(_CARRIED, released=True)
            elif self.args.on_unsafe != "report":
                raise PrivacyError(carried or _CARRIED)
        return flat[:-1]

    def note_training(self) -> None:
        """The optimizers are about to step: a later run on these weights has to count the steps of this one."""
        if not self._is_noted:
            trained_before.note(self.mode.trained, self.accountant)
            self._is_noted = True

    def _add_noise(self, flat: Tensor) -> None:
        """Of standard deviation sigma times the joint sensitivity of gradients and telemetry, whose numbers are last.

        Telemetry is not in units of C, so its coordinates have other standard deviations.
        """
        deviations = self.telemetry.deviations
        scale = self.accountant.plan.noise_multiplier * self.telemetry.stretch * self.mode.clipper.sensitivity
        if not deviations or not scale:
            self._randomness.add_normal(self._released, flat, scale)
            return
        noise = self._randomness.normal(self._released, len(flat), flat.device, scale)
        noise[len(flat) - len(deviations) :] *= torch.tensor(deviations, device=flat.device) / scale
        flat += noise

    def check_parameters(self, work: Workload) -> None:
        """The clipped parameters must be the trained ones.

        Raises:
            PrivacyError: it is not.
        """
        mine = {id(p) for p in self.mode.trained}
        if any({id(p) for p in ps if p.requires_grad} != mine for ps in (work.optimized_params, work.parameters)):
            raise PrivacyError(
                "the trained parameters have changed since the training was prepared, so other gradients are clipped "
                "than the optimizers use. Freeze and unfreeze before the Trainer runs, or train each phase with a "
                "separate Trainer."
            )

    def get_state(self) -> dict[str, Any]:
        """The spent steps, the number of released ones, and the clipping norm; no random state."""
        self.accountant.settle()
        clipper = self.mode.clipper
        limit = clipper.limit if isinstance(clipper, AdaptiveClipper) else None
        account = self.accountant.get_state()
        state = {"ledger": account.pop("ledger", None), "accountant": account, "released": self._released}
        state |= {"format": _FORMAT, "clipping_norm": limit}
        return {**state, "telemetry": self.telemetry.get_state()} if self.telemetry.is_observing else state

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `get_state`; the main process consults the ledger, the others follow it.

        Raises:
            CheckpointMismatchError: it lacks the spent steps, or was under another plan.
        """
        if "accountant" not in state:
            raise CheckpointMismatchError(
                "the checkpoint does not have the privacy cost of its training, so it cannot be accounted for. "
                "Resume from a checkpoint of a private run."
            )
        account = {**state["accountant"], "ledger": state.get("ledger")}
        if state.get("unused_steps"):  # of an earlier version
            earlier = account["plan"]
            account["unused"] = [[earlier["noise_multiplier"], earlier["sample_rate"], state["unused_steps"]]]
        self._account(lambda: self.accountant.update_state(account))
        self._released, self._is_noted = int(state["released"]), False
        if "format" not in state and self._released:
            self.accountant.note(
                f"the random numbers of train_step in the first {self._released} steps, of an earlier version: they "
                "followed from public seeds, and older checkpoints of the run have states of generators"
            )
        self.telemetry.update_state(state.get("telemetry", {}))
        if isinstance(self.mode.clipper, AdaptiveClipper) and state["clipping_norm"] is not None:
            self.mode.clipper.limit = float(state["clipping_norm"])

    def on_fresh_start(self, *, retry: bool) -> None:
        """Begin without a checkpoint; the steps of earlier starts count if this is one of them `retry`."""

        def look() -> None:
            self.accountant.on_fresh_start(retry=retry)
            self.accountant.find_unused()

        self._account(look)
        for earlier in trained_before.find(self.mode.module.parameters()):
            if earlier is None or earlier.run != self.accountant.run:
                origin = origin_in_process(earlier, self.args)
                self.accountant.start_from(*origin)

    def on_chosen_stop(self, steps_left: int) -> None:
        """From now on the statement gives the epsilon of all planned steps, as far as the budget allows them.

        A stop that depends on released values makes the number of steps an output. Every rule of stopping is
        post-processing of the planned steps, so their epsilon bounds it, while that of the taken steps need not.
        """
        self.accountant.plan_unused(self.sampling.steps_allowed(steps_left))

    def _account(self, look: Callable[[], None]) -> None:
        """Let the main process, which has the ledger, `look` into it; the others follow."""
        comm, failure = self._world.comm, None
        if self._world.is_main:
            try:
                look()
            except Exception as error:
                failure = error
        state = None if failure is not None else self.accountant.get_state()
        spent = comm.broadcast_outcome(failure, state, "reading the privacy account")
        if not self._world.is_main:
            self.accountant.update_state(spent)

    def announce_steps(self, steps: int, publish: Callable[[PrivacyStatement], None] | None) -> None:
        """Let `publish` take a statement of the next `steps` steps before the first, and another one for more steps."""
        if publish is None:
            self.accountant.publish = None
            return
        self.accountant.publish = lambda history: publish(self.statement(history, status="running"))
        self.accountant.announce_steps(steps)

    def statement(self, history: list[Entry] | None = None, status: str | None = None) -> PrivacyStatement:
        """The statement at this moment, or after the steps of `history`."""
        norms = self.args.per_sample_max_grad_norm
        if isinstance(self.mode.clipper, AdaptiveClipper):
            norms = self.mode.clipper.limit
        plan = self.accountant.plan
        unused = self.accountant.unused
        if history is None:
            history = [*self.accountant.history, *unused]
        return private_statement(
            plan,
            self.args,
            history,
            max_grad_norm=[norms] if isinstance(norms, int | float) else norms,
            grad_mode=self.mode.name,
            world_size=self._world.size,
            overrides=self.accountant.overrides,
            not_covered=self.accountant.notes,
            accountant=self.accountant,
            status=status,
            unused_steps=sum(entry[2] for entry in unused),
        )

    def close(self) -> None:
        """Leave the module as it was found, and the ledger with the steps that were taken."""
        self.mode.close()
        self.accountant.settle()
