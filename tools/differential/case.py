"""`draw` returns the random training with a given seed and number."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

from tools.differential.datasets import INDEX_KINDS, INDEXED, LOADERS
from tools.differential.networks import EXTRAS, TRUNKS, VIEWS
from tools.differential.optimizers import MAKERS, NOT_COMPLEX, SCHEDULERS
from trainstack.trainer.core.plan import TrainingPlan

Value = TypeVar("Value")

HOOKS = (
    "on_begin_train_epoch",
    "on_end_backward",
    "on_end_train_step",
    "on_end_train_epoch",
    "on_end_val_epoch",
    "on_end_train",
)
TAKE_OUTPUTS = ("on_end_train_step", "on_end_train_epoch", "on_end_val_epoch")
EVENTS = (
    "epoch_begin",
    "train_epoch_begin",
    "train_batch_begin",
    "before_backward",
    "after_backward",
    "before_optimizer_step",
    "after_optimizer_step",
    "before_zero_grad",
    "after_zero_grad",
    "train_step_end",
    "log",
    "train_epoch_end",
    "validation_begin",
    "validation_end",
    "epoch_end",
    "train_end",
)
BETWEEN_STEPS = ("on_begin_train_epoch", "on_end_train_step", "on_end_train_epoch", "train_step_end", "epoch_begin")
IN_VALIDATION = ("on_end_val_epoch", "validation_begin", "validation_end")
ACTIONS: dict[str, tuple[str, ...]] = {
    "add a layer": (*BETWEEN_STEPS, "on_end_backward", "after_optimizer_step", "epoch_end", "log"),
    "remove a layer": BETWEEN_STEPS,
    "remove a layer from the module alone": BETWEEN_STEPS,
    "replace a parameter": BETWEEN_STEPS,
    "add a parameter outside the module": ("on_end_train_step", "on_begin_train_epoch"),
    "freeze": (*BETWEEN_STEPS, "epoch_end", "on_end_backward", "train_batch_begin"),
    "unfreeze": BETWEEN_STEPS,
    "assign a new buffer": (*BETWEEN_STEPS, "on_end_backward"),
    "call eval": ("on_end_train_epoch", "on_end_val_epoch", "epoch_end", "train_epoch_end", "on_end_train_step"),
    "change the rate": (*BETWEEN_STEPS, "epoch_end", "log"),
    "draw random numbers": (*BETWEEN_STEPS, *IN_VALIDATION, "on_end_backward", "epoch_end", "after_zero_grad"),
    "log": (*BETWEEN_STEPS, *IN_VALIDATION, "on_end_backward", "train_step", "val_step", "epoch_end"),
    "log, then write": ("on_end_train_step", "train_step", "on_end_backward"),
    "write the data of gradients": ("on_end_backward", "after_backward"),
    "write gradients": ("on_end_backward", "before_optimizer_step"),
    "scale the loss": ("on_end_backward",),
    "write outputs": ("on_end_train_step", "on_end_backward"),
    "validate": BETWEEN_STEPS,
}
"""Actions of user code, each with its possible places."""
LEAVE_TRACES = {
    *("batch norm", "dropout", "noise", "recomputed", "spectral norm"),
    *("buffer written in place", "new buffer assigned"),
}
"""Parts of a network that write to buffers or draw random numbers in a forward pass."""
RAISING = (
    *HOOKS[:-1],
    *EVENTS[:-1],
    *("train_step", "after forward", "val_step", "collate", "batch_weight"),
    *("epoch_end", "on_end_train_step", "on_end_val_epoch", "after_optimizer_step"),  # twice as often
)


class SchedulerChoice(NamedTuple):
    """A scheduler of a case; see `optimizers.Scheduled`."""

    kind: str
    optimizer: int = 0
    interval: str = "step"
    frequency: int = 1
    monitor: str = ""
    factory: bool = False


class Subscriber(NamedTuple):
    """The subscriber of an event: a method of a callback, a function with a filter, or a method of the module."""

    event: str
    form: str
    every: int | None = None
    once: int | None = None


class Action(NamedTuple):
    """User code does `what` in call number `occurrence` of `where`, counted from 1."""

    where: str
    occurrence: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training, in plain values. The defaults are those of the simplest training.

    Attributes:
        ranks: the number of ranks under `rank_backend`; 0 for `sp`.
        rank_backend: `ddp` or `fsdp`.
        additive: losses and weights for which a step does not depend on the split of its batch.
        options: options of the layer `rank_backend`.
        sparse: the embedding has sparse gradients.
        reduction: "sum" for losses that are sums over samples.
        unlike_start: each rank begins with other random numbers, and so with other weights.
        poisoned: the only rank that returns nan as loss; None for all ranks.
        raises_on: the only rank that raises.
    """

    seed: int
    number: int
    network: str = "flat"
    double: bool = False
    extras: tuple[str, ...] = ()
    shift: str = ""
    modes: str = ""
    returns: str = "loss"
    loss_memory: str = ""
    weights: str = ""
    optimizers: tuple[str, ...] = ("SGD",)
    groups: int = 1
    step_hooks: bool = False
    schedulers: tuple[SchedulerChoice, ...] = ()
    data: str = "tensors"
    samples: int = 12
    indices: str = "list"
    shuffle: bool = True
    drop_last: bool = False
    no_length: bool = False
    collate: str = ""
    workers: bool = False
    val: str = ""
    val_memory: str = ""
    metrics: bool = False
    hooks: tuple[tuple[str, str], ...] = ()
    subscribers: tuple[Subscriber, ...] = ()
    actions: tuple[Action, ...] = ()
    raises: tuple[str, int] | None = None
    poison: tuple[tuple[int, str], ...] = ()
    find_lr: bool = False
    module_hooks: bool = False
    batch: int = 4
    limit: int | None = 512
    epochs: int = 2
    max_steps: int | float | None = None
    clipping: tuple[str, float] = ("norm", 1.0)
    skip: bool = False
    log_every: int | float = 2
    validate_every: int | float | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    uncompared: tuple[str, ...] = ()
    ranks: int = 0
    rank_backend: str = "ddp"
    additive: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    sparse: bool = False
    reduction: str = ""
    unlike_start: bool = False
    poisoned: int | None = None
    raises_on: int = 0

    @property
    def micro_batch(self) -> int:
        """The number of samples of a forward pass, by the plan of the library."""
        return self._plan.micro_batch

    @property
    def accumulation(self) -> int:
        """The number of micro-batches of a full step on one rank."""
        return self._plan.accumulation

    @property
    def _plan(self) -> TrainingPlan:
        return TrainingPlan.make(
            train_batch_size=self.batch, gpu_batch_size_limit=self.limit, world_size=max(1, self.ranks)
        )

    @property
    def leaves_traces(self) -> bool:
        """Whether an interrupted step can have written to buffers, drawn random numbers, or kept outputs."""
        draws = self.modes or not self.ordered  # a loader may draw its order at the first batch
        collects = any(name == "on_end_train_epoch" and form != "none" for name, form in self.hooks)
        return bool(draws or collects or set(self.extras) & LEAVE_TRACES)

    @property
    def ordered(self) -> bool:
        """Whether the library orders the data."""
        return self.data in INDEXED

    @property
    def places(self) -> set[str]:
        """The places where user code is called."""
        hooks = {name for name, _ in self.hooks}
        return hooks | {one.event for one in self.subscribers} | {"train_step", "val_step"}

    @property
    def deeds(self) -> set[str]:
        """The actions of user code in any place."""
        return {action.what for action in self.actions}

    def describe(self) -> str:
        """The case as text: its differences from the simplest training, one field in each line."""
        lines = [f"case {self.number} of seed {self.seed}"]
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in ("seed", "number") and value != one.default and value != {}:
                lines.append(f"  {one.name}: {_text(value)}")
        return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "; ".join(", ".join(str(item) for item in one if item not in ("", None, False)) for one in value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)


class Dice:
    """Draws from a generator that depends only on the given numbers."""

    def __init__(self, *of: int) -> None:
        self._random = random.Random(" ".join(map(str, of)))

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random.random() < probability

    def one(self, *options: Value) -> Value:
        """One of the options."""
        return options[int(self._random.random() * len(options))]

    def some(self, probability: float, options: Any) -> tuple[Any, ...]:
        """Each of the options with this probability, in their order."""
        return tuple(option for option in options if self.chance(probability))

    def mostly(self, usual: Value, probability: float, *others: Value) -> Value:
        """`usual`, or with this probability one of the others."""
        return self.one(*others) if self.chance(probability) else usual


def draw(seed: int, number: int, *, workers: bool = False) -> Case:
    """The case `number` of `seed`; with `workers`, loaders may have a worker process."""
    dice = Dice(seed, number)
    case = Case(seed=seed, number=number)
    for draw_part in (_network, _optimizers, _data, _arguments, _validation, _subscribers, _deeds, _trials):
        case = replace(case, **draw_part(dice, case))
    case = replace(case, workers=workers and not case.collate and dice.chance(0.5))
    return consistent(case)


def _network(dice: Dice, case: Case) -> dict[str, Any]:
    extras = list(dice.some(0.07, EXTRAS))
    memories = ("kept by the user", "view of a large tensor", "is a parameter", "hook on the loss", "own backward")
    return {
        "network": dice.one(*TRUNKS),
        "double": dice.chance(0.3),
        "extras": tuple(extras),
        "shift": dice.mostly("", 0.12, *VIEWS),
        "modes": dice.mostly("", 0.1, "frozen part", "single layer", "trainable part"),
        "returns": dice.one("loss", "loss", "tuple", "tuple", "dict", "dataclass", "list", "nested"),
        "loss_memory": dice.mostly("", 0.12, *memories),
        "weights": dice.mostly("", 0.15, "counts", "some are zero"),
    }


def _optimizers(dice: Dice, case: Case) -> dict[str, Any]:
    optimizers = tuple(dice.one(*MAKERS) for _ in range(dice.mostly(1, 0.2, 2)))
    schedulers = []
    for _ in range(dice.one(0, 0, 1, 1, 2)):
        kind, which, factory = dice.one(*SCHEDULERS), dice.one(*range(len(optimizers))), dice.chance(0.3)
        interval, frequency = dice.one("step", "step", "epoch"), dice.mostly(1, 0.2, 2)
        schedulers.append(SchedulerChoice(kind, which, interval, frequency, "", factory))
    return {
        "optimizers": optimizers,
        "groups": dice.one(1, 1, 2),
        "step_hooks": dice.chance(0.2),
        "schedulers": tuple(schedulers),
    }


def _data(dice: Dice, case: Case) -> dict[str, Any]:
    data = dice.mostly(dice.one(*INDEXED), 0.3, *LOADERS)
    return {
        "data": data,
        "indices": dice.one(*INDEX_KINDS),
        "samples": dice.one(4, 7, 8, 10, 11, 12, 13),
        "shuffle": dice.chance(0.75),
        "drop_last": dice.chance(0.2),
        "no_length": dice.chance(0.3),
        "collate": dice.mostly("", 0.25, "own", "recycles", "map"),
    }


def _arguments(dice: Dice, case: Case) -> dict[str, Any]:
    clipping = dice.one(("norm", 1.0), ("norm", 0.1), ("norm", 1e9), ("value", 0.05), ("none", 0.0), ("none", 0.0))
    more: dict[str, Any] = {}
    for name, probability, values in (
        ("fast_paths", 0.25, (False,)),
        ("seed", 0.3, (7, 2**40)),
        ("max_train_steps_per_epoch", 0.15, (1, 2)),
        ("collect_train_outputs", 0.1, (True, False)),
        ("sanity_val_steps", 0.1, (1, 2)),
        ("fit_micro_batch", 0.04, (True,)),
        ("max_val_steps_per_epoch", 0.1, (1,)),
    ):
        if dice.chance(probability):
            more[name] = dice.one(*values)
    return {
        "batch": dice.one(1, 2, 3, 4, 4, 4, 4, 6, 6, 8),
        "limit": dice.one(512, 512, None, 1, 2, 2, 3),
        "epochs": dice.one(1, 1, 2, 2, 3),
        "max_steps": dice.mostly(None, 0.3, 1, 3, 4, 5, 0.5),
        "clipping": clipping,
        "skip": dice.chance(0.25),
        "log_every": dice.one(1, 1, 2, 3, 50, 0.4),
        "validate_every": dice.mostly(None, 0.4, 0, 1, 2, 3, 0.3, -1, -2),
        "arguments": more,
    }


def _validation(dice: Dice, case: Case) -> dict[str, Any]:
    val = dice.mostly("", 0.5, "one", "one", "several")
    monitor = dice.one("train/loss_epoch", "val/loss") if val and case.validate_every is None else "train/loss_epoch"
    schedulers = []
    for one in case.schedulers:
        plateau = one.kind == "ReduceLROnPlateau"
        schedulers.append(one._replace(interval="epoch", frequency=1, monitor=monitor) if plateau else one)
    return {
        "val": val,
        "val_memory": dice.mostly("", 0.1, "one tensor") if val else "",
        "metrics": bool(val) and dice.chance(0.3),
        "schedulers": tuple(schedulers),
    }


def _subscribers(dice: Dice, case: Case) -> dict[str, Any]:
    hooks = tuple((name, dice.one("none", "star", "named")) for name in dice.some(0.3, HOOKS))
    subscribers, events = [], list(dice.some(0.12, EVENTS))
    if case.weights == "some are zero" and "before_backward" not in events and dice.chance(0.5):
        events.append("before_backward")  # does not occur for a batch with weight 0
    for event in events:
        form = dice.one("callback", "function", "module")
        every = dice.mostly(None, 0.2, 2) if form == "function" else None
        once = dice.mostly(None, 0.2, 1, 2) if form == "function" and every is None else None
        subscribers.append(Subscriber(event, form, every, once))
    return {"hooks": hooks, "subscribers": tuple(subscribers), "module_hooks": dice.chance(0.07)}


def _deeds(dice: Dice, case: Case) -> dict[str, Any]:
    actions = [
        Action(dice.one(*ACTIONS[what]), dice.one(1, 1, 2, 2, 3, 4), what)
        for what in (dice.one(*ACTIONS) for _ in range(dice.one(0, 0, 0, 1, 1, 2)))
    ]
    if any(action.what == "freeze" for action in actions) and dice.chance(0.7):
        actions.append(Action(dice.one(*ACTIONS["unfreeze"]), dice.one(2, 3, 4), "unfreeze"))
    poison = tuple((step, dice.one("loss", "infinite loss", "gradient")) for step in dice.some(0.2, range(1, 7)))
    raises = (dice.one(*RAISING), dice.one(1, 1, 2, 3)) if dice.chance(0.12) else None
    shift, log_every, schedulers = case.shift, case.log_every, case.schedulers
    if any(action.what == "write the data of gradients" for action in actions) and dice.chance(0.6):
        shift = dice.one(*VIEWS)  # the gradient can be the first tensor of the backward pass
    if raises is not None:
        log_every = dice.one(1, 1, 2)
        if raises[0] == "epoch_end":
            schedulers = (SchedulerChoice("ExponentialLR", interval="epoch"), *schedulers)
    return {
        "actions": tuple(actions),
        "poison": poison if case.skip else (),
        "raises": raises,
        "shift": shift,
        "log_every": log_every,
        "schedulers": schedulers,
    }


def _trials(dice: Dice, case: Case) -> dict[str, Any]:
    return {"find_lr": dice.chance(0.08)}


def consistent(case: Case) -> Case:
    """`case` without impossible parts, and without parts without an exact result."""
    for rule in _RULES:
        changes = rule(case)
        if changes:
            case = replace(case, **changes)
    return case


def _add_places(case: Case) -> dict[str, Any]:
    """A hook or subscriber for each action and for each error."""
    wanted = [action.where for action in case.actions] + ([case.raises[0]] if case.raises else [])
    missing = [place for place in dict.fromkeys(wanted) if place not in case.places]
    hooks = tuple((name, "none") for name in missing if name in HOOKS)
    subscribers = tuple(Subscriber(name, "callback") for name in missing if name in EVENTS)
    return {"hooks": case.hooks + hooks, "subscribers": case.subscribers + subscribers}


def _raises_alone(case: Case) -> dict[str, Any]:
    """With an error, no action changes the run, and no filter counts calls."""
    if case.raises is None:
        return {}
    place = case.raises[0]
    impossible = (
        (place in ("val_step", *IN_VALIDATION) and not case.val)
        or (place == "collate" and (case.collate not in ("own", "recycles") or not case.ordered))
        or (place == "batch_weight" and not case.weights)
    )
    subscribers = tuple(one._replace(every=None, once=None) for one in case.subscribers)
    extras = tuple(name for name in case.extras if name != "carried state")
    return {
        "raises": None if impossible else case.raises,
        "actions": (),
        "poison": (),
        "subscribers": subscribers,
        "extras": extras,
    }


def _validates_by_hand(case: Case) -> dict[str, Any]:
    """Validations in hooks count for filters, so these events have no filters."""
    if "validate" not in case.deeds:
        return {}
    subscribers = tuple(
        one._replace(every=None, once=None) if one.event in IN_VALIDATION else one for one in case.subscribers
    )
    return {"subscribers": subscribers}


def _no_schedule_of_new_groups(case: Case) -> dict[str, Any]:
    """Schedulers of torch refuse parameter groups that are added later."""
    if not {"add a layer", "add a parameter outside the module"} & case.deeds:
        return {}
    return {"schedulers": tuple(one for one in case.schedulers if one.kind == "own")}


def _no_trial(case: Case) -> dict[str, Any]:
    """Trials need samples with indices, and cannot restore attributes of user code."""
    keeps = "carried state" in case.extras
    arguments = dict(case.arguments)
    if ("on_end_train_epoch", "named") in case.hooks and arguments.get("collect_train_outputs") is False:
        del arguments["collect_train_outputs"]  # the hook needs it
    if keeps or not case.ordered:
        arguments.pop("fit_micro_batch", None)
    if not case.val:
        arguments.pop("sanity_val_steps", None)
    return {"find_lr": case.find_lr and case.ordered and not keeps, "arguments": arguments}


def _possible_data(case: Case) -> dict[str, Any]:
    data = "tensors" if case.data == "channels last" and case.network != "image" else case.data
    collate = case.collate
    if data in ("list of batches", "own loader", "recycling loader") or data.startswith("loader with"):
        collate = ""
    if data in ("dicts", "several loaders") and collate == "recycles":
        collate = "own"
    samples = case.samples
    arguments = {name: value for name, value in case.arguments.items() if name != "combine_loaders"}
    if data == "several loaders":
        samples = max(samples, case.batch)
        modes = ("min", "max", "cycle")
        arguments["combine_loaders"] = case.arguments.get("combine_loaders", modes[case.number % 3])
    if case.drop_last and data in INDEXED:
        samples = max(samples, 2 * case.batch)  # a subset has three quarters of them
    if case.drop_last and data not in INDEXED:
        samples = max(samples, case.micro_batch)
    if case.batch == 1:
        samples = min(samples, 7)
    no_length = case.no_length and data in ("own loader", "recycling loader")
    indices = case.indices if data == "subset" else "list"
    workers = case.workers and data in ("map", "getitems")
    return {
        "arguments": arguments,
        "data": data,
        "collate": collate,
        "samples": samples,
        "no_length": no_length,
        "indices": indices,
        "workers": workers,
    }


def _possible_plan(case: Case) -> dict[str, Any]:
    """Fractions need a number of steps."""
    unknown = case.no_length or case.data == "iterable data set"
    max_steps, log_every, every = case.max_steps, case.log_every, case.validate_every
    if unknown and isinstance(max_steps, float):
        max_steps = 3
    if unknown and isinstance(log_every, float) and not isinstance(max_steps, int):
        log_every = 2
    if unknown and isinstance(every, float) and not isinstance(max_steps, int):
        every = 2
    skipped_whole = case.skip or case.weights == "some are zero"
    schedulers = tuple(
        one
        for one in case.schedulers
        if one.kind != "ReduceLROnPlateau" or not (skipped_whole and "train" in one.monitor)
    )
    return {"max_steps": max_steps, "log_every": log_every, "validate_every": every, "schedulers": schedulers}


def _possible_network(case: Case) -> dict[str, Any]:
    """Some optimizers and clipping do not support complex parameters; a factory needs the optimizer of its position."""
    extras = set(case.extras)
    if case.clipping[0] == "value" or any(name in NOT_COMPLEX or name in ("Rprop",) for name in case.optimizers):
        extras.discard("complex")
    if any(one.factory and one.optimizer != position for position, one in enumerate(case.schedulers)):
        schedulers = tuple(one._replace(factory=False) for one in case.schedulers)
    else:
        schedulers = case.schedulers
    memory = "" if case.loss_memory == "is a parameter" and case.poison else case.loss_memory
    return {
        "extras": tuple(name for name in case.extras if name in extras),
        "schedulers": schedulers,
        "loss_memory": memory,
    }


def _named_outputs(case: Case) -> dict[str, Any]:
    """A hook can name its outputs only if `train_step` returns a tuple or list."""
    if case.returns in ("tuple", "list"):
        return {}
    return {
        "hooks": tuple(
            (name, "star" if form == "named" and name in TAKE_OUTPUTS else form) for name, form in case.hooks
        )
    }


_RULES: tuple[Callable[[Case], dict[str, Any]], ...] = (
    _possible_data,
    _possible_plan,
    _raises_alone,
    _validates_by_hand,
    _no_schedule_of_new_groups,
    _no_trial,
    _add_places,
    _possible_network,
    _named_outputs,
)
