"""The methods of a trainer by which hooks and callbacks change the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from trainstack.errors import ConfigurationError
from trainstack.trainer.events import Event, Filter
from trainstack.trainer.events.bus import check_event
from trainstack.trainer.mixins.base import TrainerBase

Function = TypeVar("Function", bound=Callable[..., Any])


class ControlMixin(TrainerBase):
    """Stops, limits, frozen parameters, swapped weights and subscriptions."""

    def request_stop(self, reason: str, *, then_raise: Exception | None = None) -> None:
        """Ask for the end of the training at the next step boundary; `train()` then returns.

        Hooks, other threads and signal handlers may call it, on one process or on all. Asked in a validation, the
        training ends after the epoch. An epoch under way is not ended: its hooks and its validation are left out, and
        `train()` called again goes on exactly there.

        Args:
            reason: what `stop_reason` says afterwards.
            then_raise: what `train()` raises on this process once the training has ended in good order. Ask on all
                processes to have it raised on all.
        """
        self._then_raise = then_raise
        self._stopper.request(reason)

    def end_epoch(self) -> None:
        """Leave out the rest of the epoch: its end follows after the step under way, or after its first step.

        Hooks, validation, schedulers and checkpoints of the epoch's end come as usual, then the next epoch begins. On
        several processes each one calls it in the same step. Checkpoints keep the request.

        Raises:
            ConfigurationError: no epoch is trained, the run is private, or it does not exist yet (in `on_init`).
        """
        run = self._prepared("end_epoch")
        if self.trainer_backend.is_private:
            raise ConfigurationError(
                "trainer.end_epoch() cannot shorten an epoch of a private run, whose steps are accounted for before it "
                "begins. Write max_train_steps_per_epoch in TrainerArguments."
            )
        if not self.events.is_training or self.state.epoch_end:
            raise ConfigurationError(
                "trainer.end_epoch() was called where no epoch is trained. Call it from on_train_epoch_begin until the "
                "last step of the epoch, such as in on_train_step_end."
            )
        self.state.ends_epoch = True
        run.loop.wake()

    def limit_steps_per_epoch(self, *, train: int | None = None, val: int | None = None) -> None:
        """Lower `max_train_steps_per_epoch` and `max_val_steps_per_epoch`, before the plan is made: in `on_init`.

        Plan and schedulers are then made for the shorter epochs. A lower limit of the arguments stays.

        Args:
            train: global steps of an epoch; None for no further limit.
            val: validation batches of each loader; None for no further limit.

        Raises:
            ConfigurationError: the plan exists already, a limit is no whole number from 1 on, or that of the arguments
                is a fraction.
        """
        if self._run is not None or self._making_ready:
            raise ConfigurationError(
                f"limit_steps_per_epoch(train={train!r}, val={val!r}) was called after the plan was made. Call it in "
                "on_init of a Callback, or before train()."
            )
        asked = {"max_train_steps_per_epoch": train, "max_val_steps_per_epoch": val}
        limits = {name: limit for name, limit in asked.items() if limit is not None}
        fractions = [name for name in limits if isinstance(getattr(self.args, name), float)]
        if fractions:
            raise ConfigurationError(
                f"limit_steps_per_epoch: {fractions[0]}={getattr(self.args, fractions[0])} is a fraction, and which of "
                "the two limits is lower is not known before the plan. Leave one of them out."
            )
        replace(self.args, **limits)  # type: ignore[arg-type]  # refuses what is no limit
        lower = {name: min(limit, getattr(self.args, name) or limit) for name, limit in limits.items()}
        self.args = replace(self.args, **lower)  # type: ignore[arg-type]

    def call_at_step(self, step: int, function: Callable[..., Any]) -> None:
        """Call `function` once, when global step `step` is finished: after its log point, before its validation.

        Other steps cost nothing. The function may do what a subscriber of an event may do: validate, save a checkpoint,
        or stop the training. On several processes each one asks for the same call. Checkpoints do not keep the request,
        so ask in `on_train_begin` if `step` is still to come. A run that ends before `step` does not call it.

        Args:
            step: a global step after `state.global_step`.
            function: takes the trainer, or nothing.

        Raises:
            ConfigurationError: the step is no whole number or is finished already, the function needs more than the
                trainer, or the run does not exist yet (in `on_init`).
        """
        run = self._prepared("call_at_step")
        if not isinstance(step, int) or isinstance(step, bool) or step <= self.state.global_step:
            raise ConfigurationError(
                f"call_at_step({step!r}, ...): {self.state.global_step} global steps are finished. Write a later step, "
                "a whole number."
            )
        self.events.call_at(step, function)
        run.loop.wake()  # at the next boundary the loop computes anew which step is next

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Stop training `parameters` from the next step on: no gradient, no weight decay, no momentum.

        They do not require gradients meanwhile. All ranks call it alike. A run that resumes in full has the same
        parameters frozen.

        Raises:
            ConfigurationError: the run is private, something is no parameter, a step is under way, or the optimizers do
                not exist yet.
        """
        for parameter in self._freezable("freeze", parameters):
            parameter.requires_grad_(False)

    def unfreeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train `parameters` from the next step on: they require gradients. An optimizer must hold them.

        Raises:
            ConfigurationError: as for `freeze`.
        """
        for parameter in self._freezable("unfreeze", parameters):
            parameter.requires_grad_(True)

    def _freezable(self, name: str, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        self._prepared(name)
        given = list(parameters)
        if self.trainer_backend.is_private:
            raise ConfigurationError(
                f"trainer.{name} cannot change what a private run trains. Freeze for good in the module instead: "
                "requires_grad_(False) before it is given to the trainer."
            )
        wrong = next((one for one in given if not isinstance(one, nn.Parameter)), None)
        if wrong is not None:
            raise ConfigurationError(
                f"trainer.{name} was given a {type(wrong).__name__}. Write parameters: module.encoder.parameters()."
            )
        if self.state.current_step > self.state.global_step:
            raise ConfigurationError(
                f"trainer.{name} was called in the middle of global step {self.state.current_step}. Call it between "
                "steps, in on_train_epoch_begin or on_train_step_end."
            )
        return given

    def evaluation_context(self) -> AbstractContextManager[Any]:
        """A block in which the module has the weights that are evaluated: the `evaluation_context` of each callback.

        Use it to export what was validated, such as the averages of `EMA`. Do not train in it.
        """
        return self.events.evaluation_contexts()

    def keep_trained_weights(self) -> None:
        """Keep the trained weights; from here on write others into the module's parameters and buffers, in place.

        For `on_train_end`: the export has the others, checkpoints have the trained ones, and `train()` called again
        continues from the trained ones. A second call does nothing.

        Raises:
            ConfigurationError: a training is under way, or has failed.
        """
        if self.is_training:
            raise ConfigurationError(
                "keep_trained_weights was called in a training, which would go on with other weights. Call it in "
                "on_train_end where status is 'finished' or 'stopped'; for evaluations define evaluation_context."
            )
        self.events.weight_swap.swap_in(self.module)

    @property
    def keeps_trained_weights(self) -> bool:
        """Whether the module has other weights than the trained ones, see `keep_trained_weights`."""
        return self.events.weight_swap.is_active

    def post_processing(self) -> AbstractContextManager[None]:
        """A block in which a callback may change parameters and buffers of a private run.

        A private run refuses each change that no optimizer has made, since it may carry records into later steps
        without clipping and noise. Within the block compute from weights and public values alone, as for an average of
        weights: then the change is post-processing, which differential privacy covers. It does nothing in other runs.

        Raises:
            PrivacyError: something has been changed before the block.
        """
        self._prepared("post_processing")
        return self.trainer_backend.post_processing()

    def on(
        self,
        event: Event,
        *,
        every: int | None = None,
        once: int | bool | None = None,
        when: Callable[..., Any] | None = None,
        priority: int = 0,
    ) -> Callable[[Function], Function]:
        """Subscribe a function to `event` of this trainer, as a decorator or by `trainer.on(event)(function)`.

        The function gets the trainer and what the event gives, or fewer of them from the right. A parameter with a
        default is only filled if it is called like what stands in its place. `every`, `once` and `when` exclude each
        other; what they have counted is saved in checkpoints.

        Args:
            event: a point of the run.
            every: run at the calls n, 2n, 3n, ...
            once: run at the n-th call only; True for the first.
            when: `when(trainer, filter) -> bool`, or `when(trainer)`; `filter.num_called` counts the calls.
            priority: subscribers with a higher one come first.

        Returns:
            A decorator, which returns the function as it is.

        Raises:
            ConfigurationError: the filter is wrong, or the function needs more than the event gives.
        """
        check_event(event)
        asked = any(value is not None for value in (every, once, when))
        counts = Filter(every=every, once=once, when=when) if asked else None

        def subscribe(function: Function) -> Function:
            self.events.add_function(event, function, counts, priority)
            return function

        return subscribe

    def off(self, function: Callable[..., Any]) -> None:
        """Take back all subscriptions of `function`; in the loop it takes effect with the next epoch.

        Raises:
            ConfigurationError: it has not subscribed to an event of this trainer.
        """
        if not self.events.remove(function):
            raise ConfigurationError(
                f"off({function!r}): it has not subscribed. Give the function or the bound method that was given to "
                "trainer.on(event)."
            )
