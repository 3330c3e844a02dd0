"""The methods of a trainer with which hooks and callbacks change the run."""

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
        """Request the end of training at the next step boundary; `train()` then returns.

        Hooks, other threads and signal handlers may call it, on one process or on all. After a request in a validation,
        training ends after the epoch. An epoch that is cut short does not run its end hooks and its validation; a
        second call of `train()` continues exactly there.

        Args:
            reason: value of `stop_reason` afterwards.
            then_raise: error that `train()` raises on this process after it has ended and saved normally. Call the
                method on all processes to raise it on all. Of several requests, the first reason and the first error
                count.
        """
        self._stopper.request(reason, then_raise=then_raise)

    def end_epoch(self) -> None:
        """Skip the rest of the epoch: its end follows after the current step, or after its first step.

        Hooks, validation, schedulers and checkpoints of the epoch's end run as usual. Then the next epoch begins. With
        several processes, each must call it in the same step. Checkpoints keep the request.

        Raises:
            ConfigurationError: no epoch is being trained, the run is private, or it does not exist yet (in `on_init`).
        """
        run = self._prepared("end_epoch")
        if self.trainer_backend.is_private:
            raise ConfigurationError(
                "trainer.end_epoch() cannot shorten an epoch of a private run, whose steps are accounted for before it "
                "begins. Write max_train_steps_per_epoch in TrainerArguments."
            )
        if not self.events.is_training or self.state.epoch_end:
            raise ConfigurationError(
                "trainer.end_epoch() was called while no epoch is being trained. Call it between on_train_epoch_begin "
                "and the last step of the epoch, such as in on_train_step_end."
            )
        self.state.ends_epoch = True
        run.loop.wake()

    def limit_steps_per_epoch(self, *, train: int | None = None, val: int | None = None) -> None:
        """Lower `max_train_steps_per_epoch` and `max_val_steps_per_epoch`. Call it in `on_init`, before a plan exists.

        The plan and the schedulers are made for the shorter epochs. A lower limit in the arguments is kept.

        Args:
            train: global steps an epoch; None for no further limit.
            val: validation batches of each loader; None for no further limit.

        Raises:
            ConfigurationError: the plan exists already, a limit is not a whole number above 0, or the limit in the
                arguments is a fraction.
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
                f"limit_steps_per_epoch: {fractions[0]}={getattr(self.args, fractions[0])} is a fraction, and the "
                "lower of the two limits is unknown before the plan exists. Remove one of them."
            )
        replace(self.args, **limits)  # type: ignore[arg-type]  # raises an error for an invalid limit
        lower = {name: min(limit, getattr(self.args, name) or limit) for name, limit in limits.items()}
        self.args = replace(self.args, **lower)  # type: ignore[arg-type]

    def call_at_step(self, step: int, function: Callable[..., Any]) -> None:
        """Call `function` once after global step `step`: after its log point and before its validation.

        Other steps cost nothing. The function may do the same as a subscriber of an event: validate, save a checkpoint,
        or stop training. With several processes, each must register the same call. Checkpoints do not keep it, so
        register it in `on_train_begin` if `step` is still to come. A run that ends before `step` does not call it.

        Args:
            step: a global step after `state.global_step`.
            function: function of the trainer, or without parameters.

        Raises:
            ConfigurationError: the step is not a whole number or is finished already, the function requires more than
                the trainer, or the run does not exist yet (in `on_init`).
        """
        run = self._prepared("call_at_step")
        if not isinstance(step, int) or isinstance(step, bool) or step <= self.state.global_step:
            raise ConfigurationError(
                f"call_at_step({step!r}, ...): {self.state.global_step} global steps are finished. Write a later step, "
                "a whole number."
            )
        self.events.call_at(step, function)
        run.loop.wake()  # the loop has cached the next step at which something is due

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Stop training `parameters` from the next step: no gradient, no weight decay, no momentum.

        It sets `requires_grad` to False. All ranks must make the same call. A run that resumes in full has the same
        frozen parameters.

        Args:
            parameters: parameters of the module.

        Raises:
            ConfigurationError: the run is private, an item is not a parameter, a step is running, or the optimizers do
                not exist yet.
        """
        for parameter in self._freezable("freeze", parameters):
            parameter.requires_grad_(False)

    def unfreeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train `parameters` from the next step: it sets `requires_grad` to True. An optimizer must hold them.

        Args:
            parameters: parameters of the module.

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
                f"trainer.{name} cannot change the trainable parameters of a private run. Freeze them in the module "
                "instead: call requires_grad_(False) before the trainer gets the module."
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
        """Return a context manager in which the module has the evaluated weights, see `Callback.evaluation_context`.

        Use it to export the weights that were validated, such as the averages of `EMA`. Do not train inside it.
        """
        return self.events.evaluation_contexts()

    def keep_trained_weights(self) -> None:
        """Keep a copy of the trained weights, so that others can be written in place into parameters and buffers.

        Call it in `on_train_end`. The export then has the other weights, and checkpoints have the trained ones. A later
        call of `train()` continues from the trained ones. A second call has no effect.

        Raises:
            ConfigurationError: training is running or has failed.
        """
        if self.is_training:
            raise ConfigurationError(
                "keep_trained_weights was called during training, which would continue with other weights. Call it in "
                "on_train_end if status is 'finished' or 'stopped'; for evaluations define evaluation_context."
            )
        self.events.weight_swap.swap_in(self.module)

    @property
    def keeps_trained_weights(self) -> bool:
        """Whether the module has weights other than the trained ones, see `keep_trained_weights`."""
        return self.events.weight_swap.is_active

    def post_processing(self) -> AbstractContextManager[None]:
        """Return a context manager in which a callback may change parameters and buffers of a private run.

        A private run raises an error after each change that no optimizer has made, because it may carry records into
        later steps without clipping and noise. Inside the block, compute only from weights and public values, such as
        an average of weights: then the change is post-processing, which differential privacy covers. In other runs the
        block has no effect.

        Raises:
            PrivacyError: values were changed before the block.
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
        """Subscribe a function to `event`, as a decorator or with `trainer.on(event)(function)`.

        The function gets the trainer and the values of the event; it may omit the last ones. A parameter with a default
        value gets a value only if it has the name of this value. Write at most one of `every`, `once` and `when`;
        checkpoints keep their counters.

        Args:
            event: a point of the run.
            every: run at occurrences n, 2n, 3n, ...
            once: run at the n-th occurrence only; True for the first.
            when: function `when(trainer, filter) -> bool` or `when(trainer) -> bool`; `filter.num_called` is the number
                of occurrences.
            priority: subscribers with higher priority run first.

        Returns:
            A decorator that returns the function unchanged.

        Raises:
            ConfigurationError: the filter is invalid, or the function requires more arguments than the event has
                values.
        """
        check_event(event)
        asked = any(value is not None for value in (every, once, when))
        counts = Filter(every=every, once=once, when=when) if asked else None

        def subscribe(function: Function) -> Function:
            self.events.add_function(event, function, counts, priority)
            return function

        return subscribe

    def off(self, function: Callable[..., Any]) -> None:
        """Remove all subscriptions of `function`; for events in the training loop, from the next epoch.

        Raises:
            ConfigurationError: the function has no subscription to an event of this trainer.
        """
        if not self.events.remove(function):
            raise ConfigurationError(
                f"off({function!r}): this function has no subscription. Write the function or bound method that was "
                "passed to trainer.on(event)."
            )
