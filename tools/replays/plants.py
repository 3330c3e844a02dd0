"""Planted differences, each with the step and the quantity that the report of a replay has to name."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainstack as ts
from tools.replays.runs import TIMEOUT_S, replay_from, task_of
from tools.replays.subject import SAMPLES, Settings, arguments, flip_bit, make, with_plant
from trainstack.checkpointing import write_checkpoint
from trainstack.checkpointing.reading import read_checkpoint
from trainstack.launching.options import pickle_call
from trainstack.replaying import ReplayReport
from trainstack.step_log.blocks import read_blocks
from trainstack.step_log.format import HEAD, MAGIC, Kind, first_chain, next_chain
from trainstack.trainer.core.order import DataOrder
from trainstack.verifying.comparison import checkpoints_of
from trainstack.verifying.trial import start_trial

STRIKES = 7
"""The step of the differences within a training. Checkpoints are at 4, 6, 8, 12, ..."""
USUAL = Settings()
ARGUMENTS: dict[str, Any] = {"max_grad_norm": 0.1}

Found = tuple[int, str]
"""A global step, and a quantity."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A difference between a run and its replay.

    Attributes:
        name: a description.
        full: the finding with a full record.
        default: the finding with the default record.
        settings: those of the module in the replay.
        changes: changed arguments of the replay.
        tamper: changes the folder of the run before the replay.
        begin: the first replayed step.
        says: a text that the report has instead of a difference.
    """

    name: str
    full: Found | None = None
    default: Found | None = None
    settings: Settings = USUAL
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    tamper: Callable[[Path], None] | None = None
    begin: int = 1
    says: str = ""


def plants() -> list[Plant]:
    """All planted differences."""
    return [*_at_the_start(), *_in_steps(), *_in_files()]


def _at_the_start() -> list[Plant]:
    change = functools.partial(dataclasses.replace, USUAL)
    weights = (1, "weights at the start")
    return [
        Plant(name="an edited augmentation", settings=change(augmentation=0.11), full=(1, "data"), default=(1, "data")),
        Plant(name="another dropout", settings=change(dropout=0.31), full=(1, "forward"), default=(1, "forward")),
        Plant(name="label smoothing", settings=change(smoothing=0.01), full=(1, "forward"), default=(1, "forward")),
        Plant(
            name="a learning rate", settings=change(lr=0.0101), full=(1, "learning rate"), default=(1, "learning rate")
        ),
        Plant(
            name="another schedule",
            settings=change(schedule=""),
            full=(2, "learning rate"),
            default=(2, "learning rate"),
        ),
        Plant(name="weight decay", settings=change(weight_decay=0.02), full=(1, "optimizer"), default=(2, "forward")),
        Plant(name="betas", settings=with_plant(USUAL, "betas", 1), full=(1, "optimizer"), default=(3, "forward")),
        Plant(
            name="another optimizer", settings=change(optimizer="sgd"), full=(1, "optimizer"), default=(2, "forward")
        ),
        Plant(name="another seed of the weights", settings=change(seed=1), full=weights, default=weights),
        Plant(
            name="one bit in a weight",
            settings=with_plant(USUAL, "one bit at the start", 1),
            full=weights,
            default=weights,
        ),
        Plant(name="another order", changes={"seed": 1}, full=(1, "data"), default=(1, "data")),
        Plant(name="another clipping", changes={"max_grad_norm": 0.2}, full=(1, "backward"), default=(3, "backward")),
        Plant(name="another batch size", changes={"train_batch_size": 7}, full=(1, "data"), default=(1, "data")),
        Plant(
            name="one sample swapped",
            settings=with_plant(USUAL, "swapped samples", 1),
            full=(first_step_of(0, 1), "data"),
            default=(first_step_of(0, 1), "forward"),
        ),
        Plant(
            name="one sample edited",
            settings=with_plant(USUAL, "one sample", 5),
            full=(first_step_of(5), "data"),
            default=(first_step_of(5), "forward"),
        ),
    ]


def _in_steps() -> list[Plant]:
    step = STRIKES
    expected: dict[str, tuple[Found, Found]] = {
        "another dropout draw": ((step, "forward"), (step, "forward")),
        "another order of a sum": ((step, "forward"), (step, "forward")),
        "an overflow": ((step, "forward"), (step, "forward")),
        "one bit of a gradient": ((step, "backward"), (step, "backward")),
        "one bit of a weight": ((step + 1, "forward"), (step + 1, "forward")),
        "one bit of a moment": ((step + 1, "optimizer"), (step + 1, "optimizer")),
        "a learning rate in a hook": ((step + 1, "learning rate"), (step + 1, "learning rate")),
        "a hook that draws from torch": ((step + 1, "random state"), (step + 1, "forward")),
        "a hook that draws from numpy": ((step + 1, "random state"), (step + 1, "random state")),
        "a hook that draws from random": ((step + 1, "random state"), (step + 1, "random state")),
    }
    changes = {"an overflow": {"nonfinite": "skip"}}
    return [
        Plant(
            name=name,
            settings=with_plant(USUAL, name, step),
            full=full,
            default=default,
            changes=changes.get(name, {}),
            begin=5,
        )
        for name, (full, default) in expected.items()
    ]


def _in_files() -> list[Plant]:
    return [
        Plant(name="a flipped bit in a stored checkpoint", tamper=_flip_stored, begin=9, says="DAMAGED: "),
        Plant(name="a flipped bit in a later checkpoint", tamper=_flip_stored, begin=5, says="DAMAGED: "),
        Plant(name="a forged checkpoint", tamper=_forge, begin=9, says="is not the checkpoint that the step log names"),
        Plant(name="a flipped bit in the log", tamper=_flip_log, says="is damaged"),
        Plant(name="a log without its tail", tamper=_cut_log, says="lacks blocks"),
        Plant(name="another version of torch", settings=with_plant(USUAL, "another torch", 1), says="and is 9.9.0"),
        Plant(name="another start in the log", tamper=_other_start, says="lacks blocks"),
    ]


def first_step_of(*indices: int) -> int:
    """The first step of the usual run with one of these samples."""
    order = _order()
    return min(order.index(index) for index in indices) // 8 + 1


@functools.cache
def _order() -> list[int]:
    return DataOrder(length=SAMPLES, global_batch=8, micro_batch=8).permutation(0).tolist()


def _stored(place: Path) -> Path:
    return next(info.path for info in checkpoints_of(place) if info.global_step == 8)


def _flip_stored(place: Path) -> None:
    _flip(_stored(place) / "model.safetensors", -5)


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def _forge(place: Path) -> None:
    """Write another weight, with correct hashes."""
    path = _stored(place)
    checkpoint = read_checkpoint(path)
    assert checkpoint.module_interface_state is not None
    flip_bit(next(iter(checkpoint.module_interface_state.values())))
    shutil.rmtree(path)
    write_checkpoint(checkpoint, path.parent, path.name)


def _log(place: Path) -> Path:
    return place / "step_log" / "rank-00000.log"


def _flip_log(place: Path) -> None:
    _flip(_log(place), _log(place).stat().st_size * 3 // 4)


def _cut_log(place: Path) -> None:
    """Cut the log in the middle of its steps, at the end of a block."""
    steps = [block.end for block in read_blocks(_log(place)) if block.kind == Kind.STEPS]
    data = _log(place).read_bytes()
    _log(place).write_bytes(data[: steps[len(steps) // 2]])


def _other_start(place: Path) -> None:
    """Forge the log: another version of torch, and a correct chain."""
    chain, parts = first_chain(), [MAGIC]
    for block in read_blocks(_log(place)):
        payload = block.payload
        if block.kind == Kind.START:
            start = json.loads(payload)
            start["description"]["environment"]["torch"] = "9.9.0"
            payload = json.dumps(start, separators=(",", ":")).encode()
        head = HEAD.pack(block.kind, len(payload))
        chain = next_chain(chain, head, payload)
        parts += [head, payload, chain]
    _log(place).write_bytes(b"".join(parts))


def record_run(folder: Path, mode: str, context: Any, **changes: Any) -> Path:
    """Record a run of the usual module; returns its folder."""
    place = folder / f"recorded-{mode}"
    args = arguments(place, record=mode, **{**ARGUMENTS, **changes})
    call = pickle_call(functools.partial(make, USUAL), (args,), "replays")
    with start_trial(call, folder / f"process-{mode}", None, context, TIMEOUT_S) as trial:
        trial.is_over()
    return place


def find(plant: Plant, recorded: Path, folder: Path, context: Any) -> ReplayReport:
    """Replay a copy of the run with the difference."""
    place = folder / "run"
    shutil.copytree(recorded, place)
    if plant.tamper is not None:
        plant.tamper(place)
    options: dict[str, Any] = {}
    if plant.changes:
        options["args"] = dataclasses.replace(ts.TrainerArguments.from_yaml(place / "config.yaml"), **plant.changes)
    return replay_from(task_of(plant.settings, place, context, **options), plant.begin)


def problem_of(plant: Plant, report: ReplayReport, mode: str) -> str | None:
    """The reason why the report does not have the expected finding; None if it has it."""
    if plant.says:
        return None if plant.says in str(report) else f"the report does not say {plant.says!r}: {report}"
    expected = plant.full if mode == "full" else plant.default
    found = report.first_difference
    got = None if found is None else (found.step, found.quantity)
    return None if got == expected else f"expected {expected}, got {got}: {report}"
