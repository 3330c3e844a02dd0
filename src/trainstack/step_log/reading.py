"""`read_step_log` reads the step log of a rank: the steps that led to the newest state, and contradictions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trainstack._files import open_for_reading
from trainstack.checkpointing.field_types import build
from trainstack.errors import CheckpointDamagedError, CheckpointNotFoundError
from trainstack.step_log.blocks import Block, read_blocks
from trainstack.step_log.format import (
    ENTRY,
    FOLDER,
    CheckpointNote,
    Details,
    End,
    Flag,
    Kind,
    Start,
    step_of_details,
    unpack_details,
)

Entries = np.ndarray[Any, np.dtype[np.void]]
"""An array of `ENTRY`."""
Made = TypeVar("Made", Start, CheckpointNote, End)


def log_path(run: Path, rank: int) -> Path:
    """The file of a rank's log in the folder of a run.

    Args:
        run: the folder of the run.
        rank: the rank, from 0.
    """
    return run / FOLDER / f"rank-{rank:05d}.log"


def ranks_of(run: Path) -> list[int]:
    """The ranks that have a step log in the folder of a run, in order.

    Args:
        run: the folder of the run.
    """
    names = sorted(path.stem for path in (run / FOLDER).glob("rank-*.log"))
    return [int(name[5:]) for name in names if name[5:].isdigit()]


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """The step log of one rank.

    Attributes:
        path: of its file.
        rank: of the process that wrote it.
        entries: an array of `ENTRY`, by rising step: the steps that led to the newest state. For steps that a resumed
            run has repeated, it has the last entries.
        origins: for each entry, the position in `segments` of the one that made it; int64.
        segments: the calls of `train()`, in order.
        checkpoints: those that became safe; in the log of rank 0.
        ends: the ends of segments; killed ones have none.
        damage: the reason why only a part of the file was used, as text; None if all of it is intact.
        contradictions: sentences about blocks that a checkpoint has recorded and that the log lacks.
        repeated: steps that the same number of ranks made twice with different bits, with the names of the different
            fields of `ENTRY`, by step.
        heads: the chains after each intact block, in hexadecimal digits, in order.
    """

    path: Path
    rank: int
    entries: Entries
    origins: np.ndarray[Any, np.dtype[np.int64]]
    segments: list[Start]
    checkpoints: list[CheckpointNote]
    ends: list[End]
    damage: str | None
    contradictions: list[str]
    repeated: Mapping[int, tuple[str, ...]]
    heads: list[str] = field(repr=False)
    _steps: np.ndarray[Any, np.dtype[np.int64]] = field(repr=False)
    _tables: list[list[list[str]]] = field(repr=False)
    _places: Mapping[tuple[int, int], tuple[int, int]] = field(repr=False)

    def entry(self, step: int) -> np.void | None:
        """The entry of global step `step`; None if there is none."""
        position = self._position(step)
        return None if position is None else self.entries[position]

    def details(self, step: int) -> Details | None:
        """The digests of global step `step` when it was made last; None if none were recorded.

        Raises:
            OSError: the file can no longer be read.
            CheckpointDamagedError: they do not match the names at the start of the segment.
        """
        position = self._position(step)
        segment = -1 if position is None else int(self.origins[position])
        place = self._places.get((segment, step))
        if place is None:
            return None
        with open_for_reading(self.path) as file:
            file.seek(place[0])
            payload = file.read(place[1])
        try:
            return unpack_details(payload, self.segments[segment].generators, self._tables[segment])
        except ValueError as error:
            raise CheckpointDamagedError(f"{self.path}: {error}. It was not written by trainstack.") from error

    def steps_with_details(self) -> list[int]:
        """The global steps of `entries` that have details, in order."""
        origins, positions = self.origins, ((self._position(step), segment) for segment, step in self._places)
        found = {position for position, segment in positions if position is not None and origins[position] == segment}
        return [int(self._steps[position]) for position in sorted(found)]

    def _position(self, step: int) -> int | None:
        position = int(np.searchsorted(self._steps, step))
        return position if position < len(self._steps) and self._steps[position] == step else None


def read_step_log(run: Path, rank: int = 0) -> StepLog:
    """Read the step log of a rank in the folder `run`. Of a damaged file the intact part is used.

    If a later segment had fewer ranks, the result has no entries of steps that the others have repeated since.

    Args:
        run: the folder of the run.
        rank: the rank, from 0.

    Raises:
        CheckpointNotFoundError: there is no step log.
        CheckpointDamagedError: it cannot be read.

    Examples:
        >>> from trainstack.step_log import read_step_log
        >>> trainer = ts.Trainer(module, replace(args, writers=["csv"]))
        >>> trainer.train()
        >>> log = read_step_log(trainer.output_dir)
    """
    path = log_path(run, rank)
    read = _Read(path)
    others = list[Start]()
    if rank and log_path(run, 0).exists():
        known = {start.number for start in read.segments}
        others = [start for start in _Read(log_path(run, 0)).segments if start.number not in known]
    entries, origins, repeated = _effective(read, others)
    return StepLog(
        path=path,
        rank=rank,
        entries=entries,
        origins=origins,
        segments=read.segments,
        checkpoints=read.checkpoints,
        ends=read.ends,
        damage=read.damage,
        contradictions=read.contradictions,
        repeated=repeated,
        heads=list(read.heads),
        _steps=entries["step"].astype(np.int64),  # contiguous and signed, because each search would copy it otherwise
        _tables=read.tables,
        _places=read.places,
    )


class _Read:
    """The blocks of a file, sorted by kind."""

    def __init__(self, path: Path) -> None:
        self.segments, self.checkpoints, self.ends = list[Start](), list[CheckpointNote](), list[End]()
        self.steps = list[list[bytes]]()
        self.tables = list[list[list[str]]]()
        self.places = dict[tuple[int, int], tuple[int, int]]()
        self.heads = dict[str, None]()
        self.contradictions = list[str]()
        self.damage: str | None = None
        try:
            for block in read_blocks(path, self._report):
                try:
                    self._add(block)
                except (ValueError, RecursionError) as error:
                    self._report(f"the block at byte {block.place} was not written by trainstack: {error}")
                    break
                self.heads[block.chain.hex()] = None
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"there is no step log {path}. A run writes one with TrainerArguments(record='steps'), which is the "
                "default."
            ) from error
        except OSError as error:
            raise CheckpointDamagedError(f"the step log {path} cannot be read: {error}.") from error

    def _report(self, problem: str) -> None:
        self.damage = problem

    def _add(self, block: Block) -> None:
        payload, number = block.payload, len(self.segments) - 1
        if block.kind == Kind.START:
            self._begin(_made(Start, payload))
        elif number < 0:
            raise ValueError("it comes before the start of a segment")
        elif block.kind == Kind.STEPS:
            if len(payload) % ENTRY.itemsize:
                raise ValueError("a part of an entry is missing")
            self.steps[number].append(payload)
        elif block.kind == Kind.DETAILS:
            self.places[number, step_of_details(payload)] = block.place, len(payload)
        elif block.kind == Kind.CHECKPOINT:
            self.checkpoints.append(_made(CheckpointNote, payload))
        elif block.kind == Kind.END:
            self.ends.append(_made(End, payload))
        else:
            names = json.loads(payload)
            if type(names) is not list or not all(type(name) is str for name in names):
                raise ValueError("it has no list of names")
            self.tables[number].append(names)

    def _begin(self, start: Start) -> None:
        if start.resumed_head is not None and start.resumed_head not in self.heads:
            self.contradictions.append(
                f"segment {start.number} resumed a checkpoint of global step {start.resumed_step} that was taken when "
                "the log had other blocks: the log before it was changed or cut"
            )
        self.segments.append(start)
        self.tables.append([start.parameters])
        self.steps.append([])


def _made(cls: type[Made], payload: bytes) -> Made:
    return build(cls, json.loads(payload))


_Piece = tuple[int, Entries]
"""The position of a segment, -1 for one that only other ranks have, and entries of it."""


def _effective(
    read: _Read, others: list[Start]
) -> tuple[Entries, np.ndarray[Any, np.dtype[np.int64]], dict[int, tuple[str, ...]]]:
    """The entries that led to the newest state, their segments, and the fields that differ in steps made twice."""
    pieces, retired = list[_Piece](), list[tuple[int, _Piece]]()
    differing = dict[int, set[str]]()
    starts = [*enumerate(read.segments), *((-1, start) for start in others)]
    for position, start in sorted(starts, key=lambda one: one[1].number):
        made = np.frombuffer(b"".join(read.steps[position]) if position >= 0 else b"", ENTRY)
        if np.any(made["step"][1:] <= made["step"][:-1]) or (len(made) and made["step"][0] <= start.resumed_step):
            read.damage = read.damage or f"the steps of segment {start.number} are not in order"
            made = np.sort(made, order="step")
        retired += [(int(piece[1]["step"][-1]), piece) for piece in _cut(pieces, start.resumed_step)]
        first = int(made["step"][0]) if len(made) else sys.maxsize  # a run may have thousands of segments
        for last, (old, entries) in retired:
            if last >= first and read.segments[old].world_size == start.world_size:
                for step, name in _differences(entries, made):
                    differing.setdefault(step, set()).add(name)
        pieces.append((position, made))
    filled = [(position, entries) for position, entries in pieces if len(entries)]
    entries = np.concatenate([entries for _, entries in filled]) if filled else np.empty(0, ENTRY)
    origins = [np.full(len(entries), position, np.int64) for position, entries in filled]
    repeated = {step: tuple(sorted(names)) for step, names in sorted(differing.items())}
    return entries, np.concatenate(origins) if origins else np.empty(0, np.int64), repeated


def _cut(pieces: list[_Piece], last: int) -> list[_Piece]:
    """Remove the entries of steps after `last` from `pieces`, and return them."""
    removed = list[_Piece]()
    while pieces and (not len(pieces[-1][1]) or pieces[-1][1]["step"][-1] > last):
        position, entries = pieces.pop()
        keep = int(np.searchsorted(entries["step"], last, "right"))
        if keep < len(entries):
            removed.append((position, entries[keep:]))
        if keep:
            pieces.append((position, entries[:keep]))
            break
    return removed


_BITS: Mapping[str, Callable[[Entries], np.ndarray[Any, Any]]] = {
    "epoch": lambda one: one["epoch"],
    "flags": lambda one: one["flags"] & np.uint32(Flag.SKIPPED),
    "loss": lambda one: one["loss"].view("<u8"),
    "norm": lambda one: one["norm"].view("<u8"),
    "samples": lambda one: one["samples"],
    "rates": lambda one: one["rates"],
}
NEEDS = {"norm": Flag.NORM, "samples": Flag.SAMPLES}


def _differences(before: Entries, after: Entries) -> Iterator[tuple[int, str]]:
    """The common steps with different bits, each with the name of a field."""
    steps, mine, theirs = np.intersect1d(before["step"], after["step"], assume_unique=True, return_indices=True)
    one, other = before[mine], after[theirs]
    for name, bits in _BITS.items():
        differs = bits(one) != bits(other)
        if name in NEEDS:  # a norm may have been measured in only one of them
            differs &= (one["flags"] & other["flags"] & np.uint32(NEEDS[name])) != 0
        yield from ((int(step), name) for step in steps[differs])
