"""The layer `dp`: DP-SGD with accounted steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from trainstack.backends.base import Slot, Window
from trainstack.backends.decorator import AbstractTrainerBackendDecorator
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.dp.initial_weights import check_origin
from trainstack.backends.losses import losses_per_record
from trainstack.backends.processes.borrowed import Borrowed
from trainstack.backends.spec import register_layer
from trainstack.backends.workload import Sampling, Workload
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage

if TYPE_CHECKING:  # most runs are not private, and need none of it
    from trainstack.backends.dp.budget import Accountant
    from trainstack.backends.dp.epsilon import Entry
    from trainstack.backends.dp.mechanism import Mechanism
    from trainstack.backends.dp.sealed.state_guard import StateGuard
    from trainstack.backends.privacy_statement import PrivacyStatement, WeightsOrigin
    from trainstack.backends.processes.world import World
    from trainstack.backends.random_streams import RandomStreams

_SCALER = (
    "a gradient scaler skips steps and changes its scale depending on the data, without noise. The half precision for "
    "private training is 'bf16', as in 'sp-dp-bf16'."
)


@register_layer("dp", slot=Slot.PRIVACY)
class DP(AbstractTrainerBackendDecorator):
    """Private training: (epsilon, delta)-differential privacy for each record of the training data.

    A global step is one Poisson sample over the whole data set. The gradient of each record is clipped, in float32;
    their sum gets noise, once, and is divided by the expected batch size, a constant. Abadi et al.: Deep Learning with
    Differential Privacy (2016).

    Args:
        inner: the layer inside this one.
        args: the guarantee and how to reach it.
        ledger: the file in which every step is recorded before it is taken; by default `privacy-ledger.jsonl` in the
            run's folder.
    """

    summary: ClassVar[str] = "bounds each record's gradient, adds noise to their sum and accounts for every step"
    collectives: ClassVar[str] = "one all-reduce of the noisy sum each global step"
    excludes: ClassVar[Mapping[str, str]] = {"amp": _SCALER, "amp-apex": _SCALER}
    ends: ClassVar[frozenset[str]] = frozenset({"backward", "clip"})
    refuses_updates = refuses_closures = "the noise is accounted for one gradient a step"
    refuses_replay = "its random numbers come from a secret stream, and a second pass would draw others"
    private: ClassVar[bool] = True
    bounds_gradients: ClassVar[bool] = True
    hides_losses: bool
    hides_records: bool
    public_validation: bool
    released_metrics: tuple[str, ...]
    configured_by: ClassVar[Mapping[type, str]] = {DifferentialPrivacyArguments: "args"}
    rank_zero_state: ClassVar[frozenset[str]] = frozenset({"ledger"})
    requires_state: ClassVar[bool] = True

    def __init__(
        self, inner: Any, *, args: DifferentialPrivacyArguments | None = None, ledger: str | PathLike[str] | None = None
    ) -> None:
        super().__init__(inner)
        self._args, self._ledger = args, ledger
        self.hides_losses = args is None or not args.log_train_loss
        self.hides_records = args is None or not args.expose_records
        self.public_validation = args is not None and args.public_validation
        if args is not None and args.telemetry:
            from trainstack.backends.dp.telemetry import released_names

            self.released_metrics = released_names(args)
        self._mechanism: Mechanism | None = None
        self._guard: StateGuard | None = None
        self._origin: tuple[str, Sequence[Entry], Sequence[str]] | None = None
        self._streams: RandomStreams | None = None
        self._begun = False  # the accountant knows its run

    def prepare(self, work: Workload) -> Workload:
        work = self.inner.prepare(work)
        if self._args is None:
            raise ConfigurationError(
                f"backend {self.spec!r} was not told how private the run is to be. Write differential_privacy_args="
                "DifferentialPrivacyArguments(delta=..., target_epsilon=...) in TrainerArguments."
            )
        from trainstack.backends.dp.sealed.state_guard import StateGuard
        from trainstack.backends.dp.setup import make_mechanism

        ledger = self._ledger or (work.run_dir and work.run_dir / "privacy-ledger.jsonl")
        self._mechanism = make_mechanism(
            work,
            self._args,
            ledger,
            lambda model, batch: self._run(work, model, batch, step=1),
            self.random_streams(work.world),
        )
        self._guard = StateGuard(work, self._mechanism)
        return replace(work, gradients_reduced_by=self.name)

    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        """In training, forwards and backwards: the outputs need no backward pass, and their loss is there for logs."""
        if stage is not Stage.TRAIN:
            return self.inner.forward(work, stage, batch, step)
        guard = self._state_guard
        guard.begin_step(step)
        if isinstance(batch, Borrowed):  # of a record that is not in this sample
            with torch.no_grad():
                outputs = self.inner.forward(work, stage, batch, step)
            guard.end_borrowed()
            return outputs
        self._ready.check_parameters(work)
        return guard.add(step, lambda model, part: self._run(work, model, part, step), batch)

    def _run(self, work: Workload, model: nn.Module, batch: Any, step: int) -> Any:
        with losses_per_record(work.module):
            work = work if model is work.model else replace(work, model=model)
            return self.inner.forward(work, Stage.TRAIN, batch, step)

    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        """Nothing is left to do: gradients were taken record by record."""

    def clip(self, work: Workload) -> Tensor | None:
        """Charge the step, then release the noisy mean of the clipped gradients; returns its norm."""
        return self._state_guard.release(work)

    def step(self, work: Workload) -> bool:
        """Step the optimizers, which alone may change parameters and buffers.

        Raises:
            PrivacyError: something else has changed them since the last step.
        """
        self._ready.note_training()
        with self._state_guard.optimizer_step():
            return self.inner.step(work)

    def post_processing(self) -> AbstractContextManager[None]:
        return self._state_guard.post_processing()

    def schedulers_step(self) -> AbstractContextManager[None]:
        return self._state_guard.schedulers_step()

    def on_initial_weights(self, origin: WeightsOrigin) -> None:
        is_own = origin.statement is not None and self._begun and origin.statement.run == self.accountant.run
        if self._args is not None and not is_own:  # steps of this run are in the account
            self._origin = check_origin(origin, self._args)
            if self._begun:
                self.accountant.start_from(*self._origin)
        self.inner.on_initial_weights(origin)

    def random_streams(self, world: World) -> RandomStreams:
        if self._streams is None:
            from trainstack.backends.random_streams import RandomStreams

            seed = None if self._args is None else self._args.debug_seed
            self._streams = RandomStreams.from_system(world.comm) if seed is None else RandomStreams.from_seed(seed)
        return self._streams

    def on_fresh_start(self, *, retry: bool) -> None:
        self._ready.on_fresh_start(retry=retry)
        self._begun = True
        if self._origin is not None:
            self.accountant.start_from(*self._origin)
        self.inner.on_fresh_start(retry=retry)

    def on_chosen_stop(self, steps_left: int) -> None:
        self._ready.on_chosen_stop(steps_left)
        self.inner.on_chosen_stop(steps_left)

    @property
    def keeps_values(self) -> bool:
        return self._guard is not None and self._guard.keeps_values

    @property
    def sampling(self) -> Sampling | None:
        return None if self._mechanism is None else self._mechanism.sampling

    @property
    def public_dataset_size(self) -> int | None:
        return None if self._args is None else self._args.dataset_size

    def plan_rows(self, work: Workload) -> list[tuple[str, str]]:
        from trainstack.backends.dp.batch_advice import advice_rows

        trained = sum(p.numel() for p in work.optimized_params if p.requires_grad)
        advice = advice_rows(self.accountant.plan, trained)
        return [*self.inner.plan_rows(work), *advice, *self._ready.telemetry.plan_rows()]

    @property
    def accountant(self) -> Accountant:
        """The spent epsilon and the budget."""
        return self._ready.accountant

    def pop_released(self, window: Window) -> Mapping[str, float]:
        return self._ready.telemetry.pop(window)

    def announce_steps(self, steps: int, publish: Callable[[PrivacyStatement], None] | None) -> None:
        self._ready.announce_steps(steps, publish)
        self.inner.announce_steps(steps, publish)

    def privacy_statement(self) -> PrivacyStatement:
        return self._ready.statement()

    def get_layer_state(self) -> dict[str, Any] | None:
        return {} if self._mechanism is None else self._mechanism.get_state()

    def update_layer_state(self, state: dict[str, Any]) -> None:
        self._ready.update_state(state)
        self._begun = True
        self._state_guard.forget()

    def close(self) -> None:
        try:
            if self._mechanism is not None:
                self._mechanism.close()
        finally:
            self.inner.close()

    @property
    def _ready(self) -> Mechanism:
        if self._mechanism is None:
            raise ConfigurationError("the privacy layer was asked before the module was made ready by a Trainer.")
        return self._mechanism

    @property
    def _state_guard(self) -> StateGuard:
        assert self._guard is not None  # made with the mechanism
        return self._guard
