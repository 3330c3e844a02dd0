"""`RankBattery` runs cases on several ranks and compares them with `sp`, and with each other."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.helpers.patience import patience
from tests.helpers.processes import free_port
from tools.differential.case import LEAVE_TRACES, Case
from tools.differential.comparison import may_refuse, outcome
from tools.differential.library import LibraryRun
from tools.differential.rank_cases import IN_MICRO_BATCH, depends_on_split, on_one_rank, one_pass
from tools.differential.rank_classes import RANDOM
from tools.differential.rank_run import Chosen, summary
from tools.ranks.pool import RankPool, world_environment
from trainstack.errors import ModuleContractError

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-10
WORKER = "tools.differential.rank_run:run_rank"
TIMEOUT_S = 30.0

_NEEDED = {
    "seed",
    "number",
    "ranks",
    "rank_backend",
    "additive",
    "double",
    "batch",
    "limit",
    "network",
    "data",
    "samples",
    "uncompared",
}
SIMPLIFIED = [one.name for one in fields(Case) if one.name not in _NEEDED]
"""The fields that can have their defaults in a simpler case; the others depend on each other."""


class RankBattery:
    """Runs cases on the ranks of `pool`, by default of a new one."""

    def __init__(self, pool: RankPool | None = None) -> None:
        self.pool = pool or RankPool(ROOT, ["tools.differential.rank_run"])

    def run(self, chosen: Chosen, breaks: str = "") -> list[str]:
        """Run a case on ranks and under `sp`; returns the differences.

        The library on the ranks has the fault `breaks` of `rank_breaks`.
        """
        case = chosen.case()
        with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
            answers = Path(folder) / "answers"
            answers.mkdir()
            environments = world_environment(chosen.size, free_port())
            self.pool.start(
                {
                    "function": WORKER,
                    "options": {"chosen": chosen, "folder": str(Path(folder) / "ranks"), "breaks": breaks},
                    "folder": str(answers),
                    "places": [
                        {"environment": environment, "errors": str(answers / f"{rank}.stderr")}
                        for rank, environment in enumerate(environments)
                    ],
                    "timeout_s": patience(TIMEOUT_S),
                    "fresh": False,
                }
            )
            alone = on_one_rank(case)
            expected = _through_json(
                summary(alone, outcome(alone, lambda case, task: LibraryRun(case, task, Path(folder) / "sp")))
            )
            statuses = self.pool.finish()
            ranks = [_answer(answers, rank, status) for rank, status in enumerate(statuses)]
        return compare(case, expected, ranks)

    def shrink(self, chosen: Chosen, breaks: str = "", names: Sequence[str] = SIMPLIFIED) -> Chosen:
        """A simpler case with the same difference, with defaults for as many of the fields `names` as possible."""
        kind = _kind_of(self.run(chosen, breaks))
        for name in names:
            simpler = chosen._replace(simplest=(*chosen.simplest, name))
            if simpler.case() != chosen.case() and _kind_of(self.run(simpler, breaks)) == kind:
                chosen = simpler
        return chosen


def _kind_of(lines: Sequence[str]) -> list[str]:
    """The kinds of the differences, without values."""
    return [" ".join(line.split()[:5]) for line in lines[:1]]


def _answer(folder: Path, rank: int, status: int) -> dict[str, Any]:
    path = folder / f"{rank}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    errors = (folder / f"{rank}.stderr").read_text(errors="replace")[-3000:]
    return {"error": "death", "text": f"status {status}", "traceback": errors}


def _through_json(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(value))
    return found


def compare(case: Case, expected: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The differences between the ranks, and between each of them and `sp` if they have to be equal."""
    if any("error" in one for one in ranks) or "error" in expected:
        return _errors(case, expected, ranks)
    found = _agreement(case, ranks)
    if case.raises is not None:
        return [*found, f"rank {case.raises_on} was to raise in {case.raises}"] if "raised" in expected else found
    if depends_on_split(case):
        return found
    return (
        found
        + [line for number, rank in enumerate(ranks) for line in _equality(case, expected, rank, number)]
        + (_joined_outputs(case, expected, ranks))
    )


def _errors(case: Case, expected: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """All ranks have to end; the error of the others names the failed rank."""
    kinds = [one.get("error", "none") for one in ranks]
    if case.raises is not None and "Planned" in kinds:
        return [
            f"rank {number} ended with {one.get('error')}: {one.get('text')}\n{one.get('traceback', '')}"
            for number, one in enumerate(ranks)
            if (number == case.raises_on) != (one.get("error") == "Planned")
            or (number != case.raises_on and f"rank {case.raises_on}" not in one.get("text", ""))
        ]
    refusals = [ModuleContractError(one["text"]) for one in ranks if one.get("error") == "ModuleContractError"]
    followers = [one for one in ranks if one.get("error") == "PeerError" and "ModuleContractError" in one["text"]]
    error = expected.get("error")
    alone = error == "ModuleContractError" and may_refuse(case, ModuleContractError(expected["text"]))
    if alone and not any("error" in one for one in ranks):
        return []  # with other passes, the backward pass was before the write
    if refusals and len(refusals) + len(followers) == len(ranks) and all(may_refuse(case, one) for one in refusals):
        return []
    sides = {"sp": expected, **{f"rank {number}": one for number, one in enumerate(ranks)}}
    return [
        f"{name} ended with {one['error']}: {one['text'][:400]}\n{one['traceback'][-500:]}"
        for name, one in sides.items()
        if "error" in one
    ]


def _agreement(case: Case, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Differences between ranks: bits of weights, optimizers, schedulers and counters, and the order of calls."""
    found = []
    names = [name for name in ranks[0]["state"] if _is_shared(case, name) and name not in case.uncompared]
    logged = "carried state" not in case.extras  # each rank measures another state
    for number, rank in enumerate(ranks[1:], 1):
        pair = f"rank {number} and rank 0"
        for name in names:
            found += _unlike(f"{pair}: {name}", ranks[0]["state"][name], rank["state"].get(name), 0.0)
        if logged:
            found += _unlike(f"{pair}: log", _of_library(ranks[0]["log"]), _of_library(rank["log"]), 0.0)
        mine, theirs = ([call for call in one["calls"] if call[0] != "val_step"] for one in (ranks[0], rank))
        found += _first_unlike(f"{pair}: calls", mine, theirs, 0.0)
        same = rank["random"]["random numbers of torch"] == ranks[0]["random"]["random numbers of torch"]
        if same and RANDOM not in case.uncompared:
            found.append(f"{pair}: the same random numbers of torch")
    return found


def _is_shared(case: Case, name: str) -> bool:
    """Whether ranks have equal values. Not of buffers that a forward pass writes: only those of rank 0 are saved."""
    return not (name.startswith("buffer") and LEAVE_TRACES & {*case.extras})


def _of_library(log: Mapping[str, Any]) -> dict[str, Any]:
    """The log without values of user code, because a borrowed pass does not record them."""
    return {name: column for name, column in log.items() if not name.startswith("user/")}


def _equality(case: Case, expected: Mapping[str, Any], rank: Mapping[str, Any], number: int) -> list[str]:
    """Differences between one rank and `sp`."""
    sides, found = f"rank {number} and sp", []
    for name in expected["state"]:
        if name != "counter batches" and (number == 0 or _is_shared(case, name)):
            found += _unlike(f"{sides}: {name}", expected["state"][name], rank["state"].get(name), TOLERANCE)
    logs = (expected["log"], rank["log"]) if number == 0 else (_of_library(expected["log"]), _of_library(rank["log"]))
    found += _unlike(f"{sides}: log", *logs, TOLERANCE)
    omitted = {"val_step", *(() if one_pass(case) else IN_MICRO_BATCH)}
    if case.weights == "some are zero":  # `sp` makes no backward pass for weight 0
        omitted.add("before_backward")
    mine, theirs = ([call for call in one["calls"] if call[0] not in omitted] for one in (expected, rank))
    found += _first_unlike(f"{sides}: calls", mine, theirs, TOLERANCE)
    for name, rows in expected["outputs"].items():
        if name.startswith("on_end_train_step"):
            continue
        theirs = rank["outputs"].get(name, [])
        pair = (sorted(rows), sorted(theirs)) if name.startswith("on_end_train_epoch") else (rows, theirs)
        found += _unlike(f"{sides}: {name}", *pair, TOLERANCE)
    if number == 0 and not case.unlike_start and rank["random"] != expected["random"]:
        found.append(f"{sides}: different random numbers")
    return found


def _joined_outputs(case: Case, expected: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Outputs of a step belong to the samples of the rank: all ranks together have those of `sp`."""
    found = []
    in_order = case.ordered and case.data not in ("length groups", "several loaders")  # whose rows are interleaved
    for name, rows in expected["outputs"].items():
        if name.startswith("on_end_train_step"):
            theirs = [row for rank in ranks for row in rank["outputs"].get(name, [])]
            pair = (rows, theirs) if in_order else (sorted(rows), sorted(theirs))
            found += _unlike(f"all ranks and sp: {name}", *pair, TOLERANCE)
    return found


def _is_close(one: Any, other: Any, tolerance: float) -> bool:
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    if not numbers or isinstance(one, bool) or isinstance(other, bool):
        return bool(one == other)
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= tolerance * max(1.0, abs(one), abs(other))


def _unlike(name: str, one: Any, other: Any, tolerance: float) -> list[str]:
    """The first place in which two values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            if found := _unlike(f"{name} {key}", one.get(key, "nothing"), other.get(key, "nothing"), tolerance):
                return found
        return []
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return [f"{name}: {len(one)} and {len(other)} items: {_short(one)} and {_short(other)}"]
        for position, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            if found := _unlike(f"{name} {position}", mine, theirs, tolerance):
                return found
        return []
    return [] if _is_close(one, other, tolerance) else [f"{name}: {_short(one)} and {_short(other)}"]


def _first_unlike(name: str, one: Iterable[Any], other: Iterable[Any], tolerance: float) -> list[str]:
    """The first different call of two sides, with the calls before it."""
    before: list[str] = []
    for position, (mine, theirs) in enumerate(zip_longest(one, other)):
        if _unlike("", mine, theirs, tolerance):
            return [
                f"{name} {position} (after {'; '.join(before[-3:]) or 'none'}): {_short(mine)} and {_short(theirs)}"
            ]
        before.append(f"{mine[0]} {mine[1] if len(mine) > 1 else ''}")
    return []


def _short(value: Any, most: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
