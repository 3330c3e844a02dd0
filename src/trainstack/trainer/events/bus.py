"""`Events` holds the subscribers of one trainer and calls them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from trainstack._deferred import materialized
from trainstack.errors import ConfigurationError, StopTraining, annotate
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.state_tree import copied, same
from trainstack.trainer.events.calling import call_all
from trainstack.trainer.events.event import FOREIGN_METHODS, SPANS, Callback, Event
from trainstack.trainer.events.filters import Filter, adapt_arity, filter_of, name_of
from trainstack.trainer.events.identities import match_keys, settings_hash
from trainstack.trainer.events.optimizer_modes import OptimizerModes
from trainstack.trainer.events.record_access import RECORDS, refuse_records
from trainstack.trainer.events.weight_swap import WeightSwap

Value = TypeVar("Value")


def instantiate(callbacks: Iterable[Any] | None) -> list[Callback]:
    """Return callbacks as distinct objects; classes are instantiated.

    Raises:
        ConfigurationError: an item is neither a `Callback` nor a subclass, or an object is given twice.
    """
    if isinstance(callbacks, Callback | type) or not isinstance(callbacks, Iterable | None):
        raise ConfigurationError(f"callbacks={callbacks!r}: write a list, callbacks=[...].")
    objects = [c() if isinstance(c, type) and issubclass(c, Callback) else c for c in callbacks or ()]
    for position, callback in enumerate(objects):
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks[{position}] is a {type(callback).__name__}. Write an object of a class derived from "
                "Callback; to subscribe a function, call trainer.on(Event.X)(function)."
            )
        if any(callback is other for other in objects[:position]):
            raise ConfigurationError(f"callbacks[{position}] is in the list already. Create a second object.")
    return objects


def unique_keys(pairs: Iterable[tuple[str, Value]], taken: Iterable[str | None] = ()) -> dict[str, Value]:
    """Return `pairs` as a dict; the second item with a name gets the suffix "-2", and so on."""
    named: dict[str, Value] = {}
    used = set(taken)
    for name, value in pairs:
        key, number = name, 1
        while key in used:
            number += 1
            key = f"{name}-{number}"
        used.add(key)
        named[key] = value
    return named


def check_method_names(callback: Callback, log: RunLogger) -> None:
    """Warn about methods whose names are similar to that of an event.

    Raises:
        ConfigurationError: a method has the name of an event in another library, and the method of ours is missing.
    """
    known = [event.method for event in Event]
    for name in dir(type(callback)):
        if not name.startswith("on_") or name in known:
            continue
        ours = FOREIGN_METHODS.get(name)
        if ours is not None and not hasattr(callback, ours.method):
            raise ConfigurationError(
                f"{type(callback).__name__}.{name} is another library's name of an event, and would never be called. "
                f"Write def {ours.method}({', '.join(['self', 'trainer', *ours.gives])})."
            )
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)  # not 0.6: all names share words
        if close:
            log.warning(
                f"{type(callback).__name__}.{name} does not match any event and will never be called. "
                f"Did you mean {close[0]!r}?"
            )


class Subscription:
    """A function that is called at an event.

    Args:
        event: event to subscribe to.
        function: takes the trainer and the values of the event.
        label: name of the function in messages.
        counts: filter that selects the occurrences at which it runs.
        priority: functions with higher priority run first.
        key: key of the filter's counters in checkpoints.

    Attributes:
        came: whether the event has occurred since the subscription.
        is_expected: whether to warn if the event never occurs.
        is_foreign: whether the function is defined outside of this library.

    Raises:
        ConfigurationError: the function requires more arguments than the event has values.
    """

    event: Event
    label: str
    filter: Filter | None
    priority: int
    key: str | None
    is_expected: bool
    is_foreign: bool
    came: bool

    def __init__(
        self,
        event: Event,
        function: Callable[..., Any],
        label: str,
        counts: Filter | None = None,
        priority: int = 0,
        key: str | None = None,
    ) -> None:
        self.event, self.label, self.filter, self.priority, self.key = event, label, counts, priority, key
        self.came, self.is_expected = False, True
        self.is_foreign = not str(getattr(function, "__module__", "")).startswith("trainstack.")
        self._given = function
        self._function = adapt_arity(function, ("trainer", *event.gives), f"Event.{event.name}")

    def hide_records(self) -> None:
        """Call the function with only the trainer, if the event's values contain records of a private run.

        Raises:
            PrivacyError: the function requires these values.
        """
        if RECORDS.isdisjoint(self.event.gives):
            return
        refuse_records(self._given, f"{self.label}, at Event.{self.event.name},", self.event.gives)
        function = self._given
        self._function = lambda trainer, *given: function(trainer)

    def is_of(self, function: Callable[..., Any]) -> bool:
        """Whether `function` is the function that was subscribed."""
        return self._given == function

    def call(self, trainer: AbstractTrainer, *given: Any) -> None:
        """Call the function at an occurrence of the event, if the filter selects it."""
        self.came = True
        try:
            if self.filter is None or self.filter.passes(trainer):
                self._function(trainer, *given)
        except StopTraining as stop:
            trainer.request_stop(stop.reason or f"{self.label} raised StopTraining")
        except Exception as error:
            annotate(error, f"raised in {self.label}, at Event.{self.event.name}")
            raise

    @property
    def never_ran_reason(self) -> str | None:
        """The reason why the function has never run; None if it has."""
        if self.filter is not None:
            return self.filter.never_ran_reason() if not self.filter.num_executed else None
        return None if self.came else "the event never occurred"


Fire = Callable[..., None]
OWN = "trainer"
"""Key of the trainer's own state among the states of callbacks."""
EVALUATED = "evaluated"
"""Key in this state for the callbacks whose `evaluation_context` selects the weights to evaluate."""


class Events:
    """The subscribers of one trainer.

    Subscribers of one event run in this order. The hooks of `CallbackInterface` are the first. The others follow by
    descending `priority`; those with equal priority in this order: methods of the module with names of events,
    callbacks in the given order, functions in the order of subscription.

    Args:
        trainer: trainer of the run.
        module: module whose methods with names of events subscribe too.
        callbacks: callbacks, or classes of callbacks without required arguments.
        log: logger of the run.

    Attributes:
        callbacks: the callbacks by their key in checkpoints.
        weight_swap: keeps the trained weights while the module has others after training.
        optimizer_modes: switches optimizers that have modes; empty until optimizers exist.
        is_training: whether `train()` is running.

    Raises:
        ConfigurationError: an item is not a `Callback`, or a method requires more arguments than its event has values.
    """

    trainer: AbstractTrainer
    weight_swap: WeightSwap
    is_training: bool

    def __init__(
        self, trainer: AbstractTrainer, module: object, callbacks: Iterable[Any] | None, log: RunLogger
    ) -> None:
        self.trainer, self._log = trainer, log
        self._subscriptions: dict[Event, list[Subscription]] = {event: [] for event in Event}
        self._open = set[Event]()
        self._calls: dict[int, list[Callable[[], None]]] = {}
        self._unclaimed: dict[str, Any] | None = None
        self.is_training, self._began_at = False, 0
        self.weight_swap = WeightSwap()
        self.optimizer_modes: OptimizerModes = OptimizerModes()
        self._hides_records = False
        self._add_methods(module, type(module).__name__, 0)
        self.callbacks: dict[str, Callback] = unique_keys(
            ((c.state_key or type(c).__name__, c) for c in instantiate(callbacks)), taken={OWN}
        )
        self._made = {key: settings_hash(callback) for key, callback in self.callbacks.items()}
        for key, callback in self.callbacks.items():
            self._add_methods(callback, key, callback.priority)
            check_method_names(callback, self._log)

    def _add_methods(self, owner: Any, key: str, priority: int) -> None:
        for event in Event:
            method = getattr(owner, event.method, None)
            if method is not None:
                label = f"{type(owner).__name__}.{event.method}"
                added = Subscription(event, method, label, filter_of(method), priority, f"{key}.{event.method}")
                added.is_expected = getattr(owner, "expects_all_events", True)
                self._add(added)

    def add_function(self, event: Event, function: Callable[..., Any], counts: Filter | None, priority: int) -> None:
        """Subscribe `function`; for events in the training loop, from the next epoch."""
        name = name_of(function)
        taken = {s.key for others in self._subscriptions.values() for s in others}
        key = next(iter(unique_keys([(f"{name}@{event.value}", None)], taken=taken)))
        self._add(Subscription(event, function, name, counts, priority, key))

    def remove(self, function: Callable[..., Any]) -> bool:
        """Remove `function`; return whether it was subscribed. For events in the training loop, from the next epoch."""
        found = False
        for others in self._subscriptions.values():
            kept = [subscription for subscription in others if not subscription.is_of(function)]
            found |= len(kept) < len(others)
            others[:] = kept
        return found

    def hide_records(self) -> None:
        """Pass no batch, output or loss of training to any subscriber, now or added later.

        Raises:
            PrivacyError: a subscriber requires one.
        """
        self._hides_records = True
        for subscription in (s for others in self._subscriptions.values() for s in others):
            subscription.hide_records()

    def _add(self, subscription: Subscription) -> None:
        if self._hides_records:
            subscription.hide_records()
        others = self._subscriptions[subscription.event]
        others.append(subscription)
        others.sort(key=lambda s: -s.priority)  # a stable sort keeps the order of equal priorities
        if self._unclaimed and subscription.filter is not None and subscription.key in self._unclaimed:
            subscription.filter.update_state(self._unclaimed.pop(subscription.key))

    def bound(self, event: Event) -> Fire | None:
        """Return a function that calls the subscribers with the event's values; None without subscribers."""
        calls, trainer = [subscription.call for subscription in self._subscriptions[event]], self.trainer
        if not calls:
            return None
        if len(calls) == 1:
            only = calls[0]
            return lambda *given: only(trainer, *given)

        def fire(*given: Any) -> None:
            call_all(calls, trainer, *given)

        return fire

    def has(self, event: Event) -> bool:
        """Whether `event` has a subscriber."""
        return bool(self._subscriptions[event])

    def has_foreign(self, event: Event) -> bool:
        """Whether a function from outside this library subscribes to `event`; such a function may change anything."""
        return any(subscription.is_foreign for subscription in self._subscriptions[event])

    def fire(self, event: Event, *given: Any) -> None:
        """Call the subscribers of `event`, see `call_all`."""
        if event in SPANS:
            self._open.discard(SPANS[event])
        elif event in SPANS.values():
            if event in self._open:  # an interrupted span begins again, and filters have counted its beginning
                for subscription in self._subscriptions[event]:
                    if subscription.filter is not None:
                        subscription.filter.take_back()
            self._open.add(event)
        call_all([subscription.call for subscription in self._subscriptions[event]], self.trainer, *given)

    def evaluation_contexts(self) -> ExitStack:
        """Return a context for evaluations: optimizers in evaluation mode, and the contexts of all callbacks."""
        with ExitStack() as contexts:
            contexts.enter_context(self.optimizer_modes.evaluation())
            for callback in self.callbacks.values():
                context = callback.evaluation_context(self.trainer)
                if context is not None:
                    contexts.enter_context(context)
            return contexts.pop_all()

    @contextmanager
    def trained_weights(self) -> Iterator[None]:
        """Context manager with trained weights in the module and optimizers in training mode; for checkpoints."""
        with self.weight_swap.original_weights(), self.optimizer_modes.training():
            yield

    @property
    def call_steps(self) -> Iterable[int]:
        """The global steps for which `run_calls` has functions."""
        return self._calls.keys()

    def call_at(self, step: int, function: Callable[..., Any]) -> None:
        """Register `function` to be called by `run_calls` at global step `step`.

        Raises:
            ConfigurationError: the function requires arguments in addition to the trainer.
        """
        called = name_of(function)
        call = adapt_arity(function, ("trainer",), f"call_at_step({step}, {called})")

        def run() -> None:
            try:
                call(self.trainer)
            except StopTraining as stop:
                self.trainer.request_stop(stop.reason or f"{called} raised StopTraining")
            except Exception as error:
                annotate(error, f"raised in {called}, called at global step {step}")
                raise

        self._calls.setdefault(step, []).append(run)

    def run_calls(self, step: int) -> None:
        """Call the functions registered for global step `step`, in the order of registration."""
        call_all(self._calls.pop(step, ()))

    def begin_train(self) -> None:
        """Prepare for a call of `train()`, before `TRAIN_BEGIN` is fired."""
        for key in self._unclaimed or ():
            if self.trainer.is_main_process:
                self._log.warning(
                    f"the checkpoint has a state of {key!r}, which this trainer does not have; it is ignored."
                )
        self._unclaimed, self.is_training = None, True
        self._began_at = self.trainer.state.global_step
        self.optimizer_modes.begin_training()
        self.weight_swap.swap_out()

    def end_train(self, status: str) -> None:
        """End a call of `train()` without an error; the status is "finished", "stopped" or "interrupted"."""
        self.is_training = False
        if self.optimizer_modes.is_used and status != "interrupted":
            self.weight_swap.swap_in(self.trainer.module)
            self.optimizer_modes.end_training()
        self.fire(Event.TRAIN_END, status)
        if status != "finished" or not self.trainer.is_main_process:
            return
        if self.trainer.state.global_step == self._began_at:
            return  # no step was trained, so no function could run
        for subscription in (s for others in self._subscriptions.values() for s in others):
            came = subscription.filter is not None and subscription.filter.num_called > 0
            expected = subscription.is_expected and subscription.event.is_certain
            if subscription.never_ran_reason is not None and (came or expected):
                self._log.warning(f"{subscription.label} has never run: {subscription.never_ran_reason}.")

    def fail(self, error: BaseException) -> None:
        """End a call of `train()` by `error`; errors of subscribers are added to it as notes."""
        ends = [(Event.EXCEPTION, error)]
        for event, given in [*ends, (Event.TRAIN_END, "failed")] if self.is_training else ends:
            try:
                self.fire(event, given)
            except Exception as failure:
                annotate(error, f"also, at Event.{event.name}: {type(failure).__name__}: {failure}")
        self.is_training = False

    def get_state(self) -> dict[str, Any]:
        """Return the states of callbacks and the counters of filters, by key."""
        own: dict[str, Any] = {"open": sorted(event.value for event in self._open), "made": self._made}
        plain = Callback.evaluation_context
        if evaluated := [key for key, one in self.callbacks.items() if type(one).evaluation_context is not plain]:
            own[EVALUATED] = evaluated
        states: dict[str, Any] = {OWN: own}
        states |= {key: state for key, callback in self.callbacks.items() if (state := callback.get_state())}
        return states | {key: counts.get_state() for key, counts in self._filters().items()}

    def update_state(self, states: Mapping[str, Any] | None) -> None:
        """Restore the states from `get_state` for the callbacks and filters that exist."""
        self._unclaimed = dict(states or {})
        own = self._unclaimed.pop(OWN, {})
        self._open = {event for event in Event if event.value in own.get("open", ())}
        self._rename_unclaimed(own.get("made", {}))
        owners: dict[str, Callback | Filter] = {**self.callbacks, **self._filters()}
        for key, owner in owners.items():
            if key in self._unclaimed:
                state = self._unclaimed.pop(key)
                owner.update_state(state if getattr(owner, "copies_state", False) else materialized(state))
            elif isinstance(owner, Filter) or owner.get_state():
                self._say(f"{key!r} starts from its initial state: the checkpoint has no state of it.")
        self._unclaimed = materialized(self._unclaimed)

    def _rename_unclaimed(self, saved: Mapping[str, str]) -> None:
        """Move the states of callbacks of one class to the keys of the callbacks with the same settings."""
        named: dict[str, list[str]] = {}
        for key, callback in self.callbacks.items():
            named.setdefault(callback.state_key or type(callback).__name__, []).append(key)
        renamed = match_keys(named, self._made, saved)
        states, self._unclaimed = self._unclaimed or {}, {}
        for key, state in states.items():
            owner, dot, method = key.rpartition(".")
            plain = key in saved or not dot
            new = renamed.get(key, key) if plain else f"{renamed.get(owner, owner)}.{method}"
            self._unclaimed[new] = state

    def warn_of_other_weights(self, states: Mapping[str, Any] | None) -> None:
        """Warn about callbacks that selected the evaluated weights in the run of `states` and are missing here."""
        for key in (states or {}).get(OWN, {}).get(EVALUATED, ()):
            if key in (self._unclaimed or {}) and self.trainer.is_main_process:
                self._log.warning(
                    f"the run of the checkpoint evaluated weights of its callback {key!r}, which this trainer does "
                    "not have. It evaluates the trained weights. Add the callback to evaluate the same weights."
                )

    def put_back(self, states: Mapping[str, Any]) -> None:
        """Restore the states from `get_state` of this process where they differ from the current ones.

        A callback that had no state gets an empty one.
        """
        now = self.get_state()
        self._open = {event for event in Event if event.value in states[OWN]["open"]}
        owners: dict[str, Callback | Filter] = {**self.callbacks, **self._filters()}
        for key, owner in owners.items():
            before = states.get(key, {})
            if same(now.get(key, {}), before):
                continue
            try:
                owner.update_state(copied(before))
            except Exception as error:
                if before:
                    raise
                self._say(f"{key!r} could not load its empty state ({type(error).__name__}: {error}).")

    def _say(self, what: str) -> None:
        if self.trainer.is_main_process:
            self._log.info(what)

    def _filters(self) -> dict[str, Filter]:
        every = (s for others in self._subscriptions.values() for s in others)
        return {s.key: s.filter for s in every if s.filter is not None and s.key is not None}


def check_event(event: Any) -> None:
    """Check that `event` is an event that can still occur.

    Raises:
        ConfigurationError: it is not.
    """
    if not isinstance(event, Event):
        raise ConfigurationError(
            f"on({event!r}): this is not an event. Write one of {', '.join(f'Event.{e.name}' for e in Event)}."
        )
    if event is Event.INIT:
        raise ConfigurationError("Event.INIT has already fired when a Trainer exists. Define Callback.on_init instead.")
