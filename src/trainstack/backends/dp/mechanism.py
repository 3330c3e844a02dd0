"""`Mechanism` turns sums of clipped per-record gradients into noisy gradients."""

from __future__ import annotations

import logging
import math
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
from trainstack.backends.privacy_statement import PrivacyStatement
from trainstack.backends.processes.world import World
from trainstack.backends.single_process import move_to_device
from trainstack.backends.workload import Sampling, Workload
from trainstack.errors import CheckpointMismatchError, PrivacyError

_log = logging.getLogger("trainstack")


class Mechanism:
    """The Poisson-subsampled Gaussian mechanism of one run, on all its processes.

    Args:
        args: what was promised.
        accountant: is charged before the noise of a step is drawn.
        mode: gives the sums of clipped gradients.
        randomness: of the noise.
        sampling: draws the records.
        world: this process's place; the main process draws the noise.
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
        self._released = 0
        self.notes: tuple[str, ...] = ()
        self.on_begin: Callable[[], None] = lambda: None
        self._write_detector = WriteDetector(mode.module)

    def add(self, run: Run, batch: Any) -> Any:
        """Add a micro-batch to the step under way; returns what `train_step` returned, without its graph.

        Raises:
            PrivacyError: `train_step` wrote into a parameter or buffer, which thereby learns without noise.
        """
        batch = move_to_device(batch, self._world.device)
        self._write_detector.begin()
        outputs = self.mode.add(run, batch, count_records(batch))
        changed = self._write_detector.changed()
        if changed is not None:
            self.refuse(
                f"{changed} changes in a forward pass: it would learn from records without clipping and noise. Let "
                "nothing but optimizers change parameters and buffers in a private run."
            )
        return outputs

    def refuse(self, reason: str, *, released: bool = False) -> None:
        """End the run for a reason that voids the guarantee; with `on_unsafe="report"` note it and continue.

        Args:
            reason: the first sentence goes into the statement.
            released: whether a step that this concerns has been released already. The statement then has the reason
                also where the run ends.

        Raises:
            PrivacyError: always without `on_unsafe="report"`, and on processes other than the main one.
        """
        report, known = self.args.on_unsafe == "report" and self._world.is_main, self.accountant.overrides
        if report or released:
            self.accountant.overrides = tuple(dict.fromkeys((*known, reason.partition(". ")[0])))
        if not report:
            raise PrivacyError(reason)
        if self.accountant.overrides != known:
            _log.warning("the run is not private any more: %s", reason)

    def note(self, text: str) -> None:
        """Add a line to the statement of this process: the guarantee does not cover `text`.

        No checkpoint has it: another process makes the same checks, and notes what it finds.
        """
        self.notes = tuple(dict.fromkeys((*self.notes, text)))

    def discard(self) -> None:
        """Forget what a step that was broken off has added up: a record would count twice in the next one.

        Steps are about to be made; `on_begin` is called.
        """
        self.on_begin()
        self.mode.pop_sums()
        if isinstance(self.mode.clipper, AdaptiveClipper):
            self.mode.clipper.pop_counts()

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
        sums = self.mode.pop_sums()
        clipper = self.mode.clipper
        adaptive = clipper if isinstance(clipper, AdaptiveClipper) else None
        counts = [] if adaptive is None else [adaptive.pop_counts().to(sums[0].device).reshape(1)]
        flat = torch.cat([part.flatten() for part in sums] + counts)
        if self._world.is_main:
            flat += self._noise(len(flat), adaptive, flat.device)
        self._world.comm.all_reduce_(flat)
        flat /= self.accountant.plan.expected_batch_size
        gradient = flat if adaptive is None else flat[:-1]
        parts = torch.split(gradient, [part.numel() for part in sums])
        for parameter in work.optimized_params:
            parameter.grad = None  # nothing but what is released here may reach an optimizer
        for parameter, part in zip(self.mode.trained, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        if adaptive is not None:
            unclipped = 0.5 + float(flat[-1])
            adaptive.limit *= math.exp(-self.args.clip_learning_rate * (unclipped - self.args.target_quantile))
        norm: Tensor = torch.linalg.vector_norm(gradient)
        return norm

    def _noise(self, count: int, adaptive: AdaptiveClipper | None, device: torch.device) -> Tensor:
        """Of standard deviation sigma times the sensitivity; for adaptive clipping the last number is the count's.

        The count and the gradients then share what one step may spend: Andrew et al. 2019, theorem 1.
        """
        sigma = self.accountant.plan.noise_multiplier
        noise = self._randomness.normal(self._released, count, device)
        if adaptive is None or sigma == 0:
            return noise.mul_(sigma * self.mode.clipper.sensitivity)
        # A twentieth of the batch, as Andrew et al. recommend; at least sigma, since it must be above half of that.
        count_noise = self.args.count_noise_multiplier or max(self.accountant.plan.expected_batch_size / 20, sigma)
        noise[-1] *= count_noise
        noise[:-1] *= (sigma**-2 - (2 * count_noise) ** -2) ** -0.5 * adaptive.sensitivity
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
        return {"accountant": self.accountant.get_state(), "released": self._released, "clipping_norm": limit}

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
        self._released = int(state["released"])
        if isinstance(self.mode.clipper, AdaptiveClipper) and state["clipping_norm"] is not None:
            self.mode.clipper.limit = float(state["clipping_norm"])

    def on_fresh_start(self, *, retry: bool) -> None:
        """Begin without a checkpoint; the steps of earlier starts count if this is one of them `retry`."""
        self._account(lambda: self.accountant.on_fresh_start(retry=retry))

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
        return private_statement(
            self.accountant.plan,
            self.args,
            self.accountant.history,
            max_grad_norm=[norms] if isinstance(norms, int | float) else norms,
            grad_mode=self.mode.name,
            world_size=self._world.size,
            overrides=self.accountant.overrides,
            notes=self.notes,
        )

    def close(self) -> None:
        """Leave the module as it was found, and the ledger with what was really spent."""
        self.mode.close()
        self.accountant.settle()
