"""`Events` holds the subscribers of one trainer."""

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
    """Callbacks as objects, each a different one.

    Raises:
        ConfigurationError: something is neither a `Callback` nor a class of them, or is given twice.
    """
    if isinstance(callbacks, Callback | type) or not isinstance(callbacks, Iterable | None):
        raise ConfigurationError(f"callbacks={callbacks!r}: write a list, callbacks=[...].")
    objects = [c() if isinstance(c, type) and issubclass(c, Callback) else c for c in callbacks or ()]
    for position, callback in enumerate(objects):
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks[{position}] is a {type(callback).__name__}. Give an object of a class derived from "
                "Callback; a function subscribes by trainer.on(Event.X)(function)."
            )
        if any(callback is other for other in objects[:position]):
            raise ConfigurationError(f"callbacks[{position}] is in the list already. Make another one.")
    return objects


def unique_keys(pairs: Iterable[tuple[str, Value]], taken: Iterable[str | None] = ()) -> dict[str, Value]:
    """`pairs` as a dict; the second of one name gets "-2" behind it, and so on."""
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
    """Warn of methods that are called like an event, but for a slip.

    Raises:
        ConfigurationError: a method has the name that another library has for an event, and nothing has ours.
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
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        if close:
            log.warning(
                f"{type(callback).__name__}.{name} does not match any event and will never be called. "
                f"Did you mean {close[0]!r}?"
            )


class Subscription:
    """A function that is called when an event comes.

    Args:
        function: takes the trainer, and what the event gives.
        label: its name in messages.
        counts: lets it run at some occurrences only; a checkpoint keeps the counters under `key`.

    Attributes:
        came: whether the event has come since it subscribed.
        is_expected: whether it is worth a word if the event never comes.
        is_foreign: whether the function is not the library's own.

    Raises:
        ConfigurationError: the function needs more than the event gives.
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
        """Call the function with the trainer alone where the event gives records of a private run.

        Raises:
            PrivacyError: the function needs them.
        """
        if RECORDS.isdisjoint(self.event.gives):
            return
        refuse_records(self._given, f"{self.label}, at Event.{self.event.name},", 1, self.event.gives)
        function = self._given
        self._function = lambda trainer, *given: function(trainer)

    def is_of(self, function: Callable[..., Any]) -> bool:
        """Whether `function` is what subscribed."""
        return self._given == function

    def call(self, trainer: AbstractTrainer, *given: Any) -> None:
        """The event has come."""
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
        """Why it has never run, if it has not."""
        if self.filter is not None:
            return self.filter.never_ran_reason() if not self.filter.num_executed else None
        return None if self.came else "the event never came"


Fire = Callable[..., None]
OWN = "trainer"
"""The key of what the trainer itself keeps among the states of callbacks."""
EVALUATED = "evaluated"
"""The key in there of the callbacks whose `evaluation_context` chooses the weights to evaluate."""


def _evaluates_others(callback: Callback) -> bool:
    return type(callback).evaluation_context is not Callback.evaluation_context


class Events:
    """The subscribers of one trainer.

    Those of the same event run in this order: the hooks of `CallbackInterface`; then by `priority`, higher ones first;
    among equals methods of the module that are named after events, callbacks as they were given, functions as they
    were subscribed.

    Args:
        module: its methods subscribe as well.
        callbacks: objects, or classes that are made without arguments.

    Attributes:
        callbacks: the objects, by their key in checkpoints.
        weight_swap: holds the trained weights while others are in the module, after a training.
        optimizer_modes: switches optimizers with modes; without optimizers until they are made.
        is_training: whether `train()` is under way.

    Raises:
        ConfigurationError: one is no `Callback`, or a method needs more than its event gives.
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
        """Subscribe `function`; in the loop it takes effect with the next epoch."""
        name = name_of(function)
        taken = {s.key for others in self._subscriptions.values() for s in others}
        key = next(iter(unique_keys([(f"{name}@{event.value}", None)], taken=taken)))
        self._add(Subscription(event, function, name, counts, priority, key))

    def remove(self, function: Callable[..., Any]) -> bool:
        """Call `function` no more; in the loop it takes effect with the next epoch. Whether it had subscribed."""
        found = False
        for others in self._subscriptions.values():
            kept = [subscription for subscription in others if not subscription.is_of(function)]
            found |= len(kept) < len(others)
            others[:] = kept
        return found

    def hide_records(self) -> None:
        """Give no batch, output or loss of training to a subscriber, those that are still to come included.

        Raises:
            PrivacyError: a subscriber needs one.
        """
        self._hides_records = True
        for subscription in (s for others in self._subscriptions.values() for s in others):
            subscription.hide_records()

    def _add(self, subscription: Subscription) -> None:
        if self._hides_records:
            subscription.hide_records()
        others = self._subscriptions[subscription.event]
        others.append(subscription)
        others.sort(key=lambda s: -s.priority)  # stable
        if self._unclaimed and subscription.filter is not None and subscription.key in self._unclaimed:
            subscription.filter.update_state(self._unclaimed.pop(subscription.key))

    def bound(self, event: Event) -> Fire | None:
        """What to call with all that `event` gives but the trainer; None if nobody subscribes to it."""
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
        """Whether anybody subscribes to `event`."""
        return bool(self._subscriptions[event])

    def has_foreign(self, event: Event) -> bool:
        """Whether a function that is not the library's own subscribes to `event`; it may change anything."""
        return any(subscription.is_foreign for subscription in self._subscriptions[event])

    def fire(self, event: Event, *given: Any) -> None:
        """Call the subscribers of `event`, see `call_all`."""
        if event in SPANS:
            self._open.discard(SPANS[event])
        elif event in SPANS.values():
            if event in self._open:  # what was interrupted begins once more: filters have counted it already
                for subscription in self._subscriptions[event]:
                    if subscription.filter is not None:
                        subscription.filter.take_back()
            self._open.add(event)
        call_all([subscription.call for subscription in self._subscriptions[event]], self.trainer, *given)

    def evaluation_contexts(self) -> ExitStack:
        """A block in which the module is as it is evaluated: optimizers in their modes, all callbacks' contexts."""
        with ExitStack() as contexts:
            contexts.enter_context(self.optimizer_modes.evaluation())
            for callback in self.callbacks.values():
                context = callback.evaluation_context(self.trainer)
                if context is not None:
                    contexts.enter_context(context)
            return contexts.pop_all()

    @contextmanager
    def trained_weights(self) -> Iterator[None]:
        """A block in which module and optimizers are as they are trained; for checkpoints."""
        with self.weight_swap.original_weights(), self.optimizer_modes.training():
            yield

    @property
    def call_steps(self) -> Iterable[int]:
        """The global steps at which `run_calls` has something to do."""
        return self._calls.keys()

    def call_at(self, step: int, function: Callable[..., Any]) -> None:
        """Have `run_calls` call `function` at global step `step`.

        Raises:
            ConfigurationError: the function needs more than the trainer.
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
        """Call what was asked for at global step `step`, in the order of the requests."""
        call_all(self._calls.pop(step, ()))

    def begin_train(self) -> None:
        """`train()` begins; `TRAIN_BEGIN` is about to be fired."""
        for key in self._unclaimed or ():
            if self.trainer.is_main_process:
                self._log.warning(
                    f"the checkpoint has a state of {key!r}, which this trainer does not have; it is left out."
                )
        self._unclaimed, self.is_training = None, True
        self._began_at = self.trainer.state.global_step
        self.optimizer_modes.begin_training()
        self.weight_swap.swap_out()

    def end_train(self, status: str) -> None:
        """`train()` ends in good order: "finished", "stopped" or "interrupted"."""
        self.is_training = False
        if self.optimizer_modes.is_used and status != "interrupted":
            self.weight_swap.swap_in(self.trainer.module)
            self.optimizer_modes.end_training()
        self.fire(Event.TRAIN_END, status)
        if status != "finished" or not self.trainer.is_main_process:
            return
        if self.trainer.state.global_step == self._began_at:
            return  # nothing was trained, so nothing could run
        for subscription in (s for others in self._subscriptions.values() for s in others):
            came = subscription.filter is not None and subscription.filter.num_called > 0
            expected = subscription.is_expected and subscription.event.is_certain
            if subscription.never_ran_reason is not None and (came or expected):
                self._log.warning(f"{subscription.label} has never run: {subscription.never_ran_reason}.")

    def fail(self, error: BaseException) -> None:
        """`train()` ends by `error`; what fails now is noted at it."""
        ends = [(Event.EXCEPTION, error)]
        for event, given in [*ends, (Event.TRAIN_END, "failed")] if self.is_training else ends:
            try:
                self.fire(event, given)
            except Exception as failure:
                annotate(error, f"also, at Event.{event.name}: {type(failure).__name__}: {failure}")
        self.is_training = False

    def get_state(self) -> dict[str, Any]:
        """The states of callbacks and the counters of filters, by key."""
        own: dict[str, Any] = {"open": sorted(event.value for event in self._open), "made": self._made}
        if evaluated := [key for key, one in self.callbacks.items() if _evaluates_others(one)]:
            own[EVALUATED] = evaluated
        states: dict[str, Any] = {OWN: own}
        states |= {key: state for key, callback in self.callbacks.items() if (state := callback.get_state())}
        return states | {key: counts.get_state() for key, counts in self._filters().items()}

    def update_state(self, states: Mapping[str, Any] | None) -> None:
        """Take back what `get_state` returned, as far as there is somebody for it."""
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
                self._say(f"{key!r} starts anew: the checkpoint has no state of it.")
        self._unclaimed = materialized(self._unclaimed)

    def _rename_unclaimed(self, saved: Mapping[str, str]) -> None:
        """Give the states of callbacks of one class the keys of those with the same settings."""
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
        """Warn of callbacks that made the evaluations of the checkpoint with `states`, and that this trainer lacks."""
        for key in (states or {}).get(OWN, {}).get(EVALUATED, ()):
            if key in (self._unclaimed or {}) and self.trainer.is_main_process:
                self._log.warning(
                    f"the run of the checkpoint was evaluated with weights of its callback {key!r}, which this trainer "
                    "does not have. It evaluates the trained weights. Give it the callback for the others."
                )

    def put_back(self, states: Mapping[str, Any]) -> None:
        """Give back what `get_state` returned in this process to those that have another state now, without a word.

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
                self._say(f"{key!r} could not be given back its empty state ({type(error).__name__}: {error}).")

    def _say(self, what: str) -> None:
        if self.trainer.is_main_process:
            self._log.info(what)

    def _filters(self) -> dict[str, Filter]:
        every = (s for others in self._subscriptions.values() for s in others)
        return {s.key: s.filter for s in every if s.filter is not None and s.key is not None}


def check_event(event: Any) -> None:
    """Check that `event` is one that is still to come.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(event, Event):
        raise ConfigurationError(
            f"on({event!r}): that is no event. Write one of {', '.join(f'Event.{e.name}' for e in Event)}."
        )
    if event is Event.INIT:
        raise ConfigurationError("Event.INIT has already fired when a Trainer exists. Define Callback.on_init instead.")
