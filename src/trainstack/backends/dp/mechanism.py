"""`Mechanism` turns sums of clipped per-record gradients into noisy gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.dp.budget import Accountant
from trainstack.backends.dp.clipping import AdaptiveClipper
from trainstack.backends.dp.modes.base import GradientMode, Run
from trainstack.backends.dp.modes.probing import WriteDetector
from trainstack.backends.dp.randomness import Randomness
from trainstack.backends.dp.sampling import count_records
from trainstack.backends.dp.statement import private_statement
from trainstack.backends.dp.telemetry import Telemetry
from trainstack.backends.privacy_statement import PrivacyStatement
from trainstack.backends.processes.world import World
from trainstack.backends.single_process import move_to_device
from trainstack.backends.workload import Sampling, Workload
from trainstack.errors import CheckpointMismatchError, PrivacyError


class Mechanism:
    """The Poisson-subsampled Gaussian mechanism of one run, on all its processes.

    Args:
        args: what was promised.
        accountant: is charged before the noise of a step is drawn.
        mode: gives the sums of clipped gradients.
        randomness: of the noise.
        sampling: draws the records.
        world: this process's place; the main process draws the noise.

    Attributes:
        telemetry: metrics of records that are released with the gradients.
    """

    def __init__(
        self,
        *,
        args: DifferentialPrivacyArguments,
        accountant: Accountant,
        mode: GradientMode,
        randomness: Randomness,
        sampling: Sampling,
        world: World,
    ) -> None:
        self.args, self.accountant, self.mode, self.sampling = args, accountant, mode, sampling
        self._randomness, self._world = randomness, world
        self._released = self._unused_steps = 0
        self._write_detector = WriteDetector(mode.module)
        self.telemetry = Telemetry(args, accountant.plan, mode.clipper, one_by_one=mode.one_by_one)
        mode.observer = self.telemetry.observe if self.telemetry.is_observing else None

    def add(self, run: Run, batch: Any) -> Any:
        """Add a micro-batch to the step under way; returns what `train_step` returned, without its graph.

        Raises:
            PrivacyError: `train_step` wrote into a parameter or buffer, which thereby learns without noise.
        """
        batch = move_to_device(batch, self._world.device)
        self._write_detector.begin()
        records = count_records(batch)
        outputs = self.mode.add(run, batch, records)
        self.telemetry.check_observed(records)
        changed = self._write_detector.changed()
        if changed is not None:
            raise PrivacyError(
                f"{changed} changes in a forward pass: it would learn from records without clipping and noise. Let "
                "nothing but optimizers change parameters and buffers while private training goes on."
            )
        return outputs

    def discard(self) -> None:
        """Forget what a step that was broken off has added up: a record would count twice in the next one."""
        self.telemetry.pop_sums(self.mode.pop_sums()[0].device)

    def release(self, work: Workload) -> Tensor:
        """End the step: charge it, add noise to the sum over all processes, and set the gradients.

        Returns:
            The joint L2 norm of the gradients, 0-dim.

        Raises:
            PrivacyBudgetError: the step would exceed the budget; nothing is released.
        """
        self.check_parameters(work)
        self.accountant.charge()
        self._released += 1
        self._unused_steps = max(0, self._unused_steps - 1)
        sums = self.mode.pop_sums()
        flat = torch.cat([*(part.flatten() for part in sums), self.telemetry.pop_sums(sums[0].device)])
        if self._world.is_main:
            flat += self._noise(len(flat), flat.device)
        self._world.comm.all_reduce_(flat)
        flat /= self.accountant.plan.expected_batch_size
        size = sum(part.numel() for part in sums)
        gradient = flat[:size]
        parts = torch.split(gradient, [part.numel() for part in sums])
        for parameter in work.optimized_params:
            parameter.grad = None  # nothing but what is released here may reach an optimizer
        for parameter, part in zip(self.mode.trained, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        self.telemetry.release(flat[size:])
        norm: Tensor = torch.linalg.vector_norm(gradient)
        return norm

    def _noise(self, count: int, device: torch.device) -> Tensor:
        """Of standard deviation sigma times the joint sensitivity of gradients and telemetry, whose numbers are last.

        Telemetry is not in units of C, so its part has standard deviations of its own.
        """
        noise = self._randomness.normal(self._released, count, device)
        deviations = self.telemetry.deviations
        size = count - len(deviations)
        noise[:size] *= self.accountant.plan.noise_multiplier * self.telemetry.stretch * self.mode.clipper.sensitivity
        if deviations:
            noise[size:] *= torch.tensor(deviations, device=device)
        return noise

    def check_parameters(self, work: Workload) -> None:
        """What is clipped must be what is trained.

        Raises:
            PrivacyError: it is not.
        """
        mine = {id(p) for p in self.mode.trained}
        if any({id(p) for p in ps if p.requires_grad} != mine for ps in (work.optimized_params, work.parameters)):
            raise PrivacyError(
                "the parameters that are trained have changed since training was made ready, so their gradients are "
                "not those that are clipped. Freeze and unfreeze before the Trainer runs, or train each phase with a "
                "Trainer of its own."
            )

    def get_state(self) -> dict[str, Any]:
        """What was spent, how many steps were released, and the clipping norm; no random state."""
        self.accountant.settle()
        clipper = self.mode.clipper
        limit = clipper.limit if isinstance(clipper, AdaptiveClipper) else None
        state = {"accountant": self.accountant.get_state(), "released": self._released, "clipping_norm": limit}
        state |= {"unused_steps": self._unused_steps} if self._unused_steps else {}
        return {**state, "telemetry": self.telemetry.get_state()} if self.telemetry.is_observing else state

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` returned; the main process consults the ledger, the others follow it.

        Raises:
            CheckpointMismatchError: it lacks what was spent, or was under another plan.
        """
        if "accountant" not in state:
            raise CheckpointMismatchError(
                "the checkpoint does not tell what privacy its training has cost, so it cannot be accounted for. "
                "Resume from a checkpoint of a private run."
            )
        self._account(lambda: self.accountant.update_state(state["accountant"]))
        self._released, self._unused_steps = int(state["released"]), int(state.get("unused_steps", 0))
        self.telemetry.update_state(state.get("telemetry", {}))
        if isinstance(self.mode.clipper, AdaptiveClipper) and state["clipping_norm"] is not None:
            self.mode.clipper.limit = float(state["clipping_norm"])

    def on_fresh_start(self, *, retry: bool) -> None:
        """Begin without a checkpoint; the steps of earlier starts count if this is one of them `retry`."""
        self._account(lambda: self.accountant.on_fresh_start(retry=retry))

    def on_chosen_stop(self, steps_left: int) -> None:
        """From now on the statement gives the epsilon of all planned steps, as far as the budget allows them.

        A stop that depends on released values makes the number of steps an output. Every rule of stopping is
        post-processing of the planned steps, so their epsilon bounds it, while that of the taken steps need not.
        """
        self._unused_steps = self.sampling.steps_allowed(steps_left)

    def _account(self, look: Callable[[], None]) -> None:
        """Let the main process, which has the ledger, `look` into it; the others follow."""
        comm, failure = self._world.comm, None
        if self._world.is_main:
            try:
                look()
            except Exception as error:
                failure = error
        spent = comm.broadcast_outcome(failure, self.accountant.get_state(), "reading the privacy account")
        if not self._world.is_main:
            self.accountant.update_state(spent)

    def statement(self) -> PrivacyStatement:
        """What is guaranteed at this moment."""
        norms = self.args.per_sample_max_grad_norm
        if isinstance(self.mode.clipper, AdaptiveClipper):
            norms = self.mode.clipper.limit
        plan, history = self.accountant.plan, self.accountant.history
        if self._unused_steps:
            history = [*history, (plan.noise_multiplier, plan.sample_rate, self._unused_steps)]
        return private_statement(
            plan,
            self.args,
            history,
            max_grad_norm=[norms] if isinstance(norms, int | float) else norms,
            grad_mode=self.mode.name,
            world_size=self._world.size,
            overrides=self.accountant.overrides,
            unused_steps=self._unused_steps,
        )

    def close(self) -> None:
        """Leave the module as it was found, and the ledger with what was really spent."""
        self.mode.close()
        self.accountant.settle()
