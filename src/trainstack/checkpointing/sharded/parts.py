"""The files that one rank writes, and the function of the main process that joins the files of all ranks.

A rank writes a small file `part-00000.json` next to its tensors: the index of its files, and its shares of divided
chunks. The main process reads these, writes one index, and deletes them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainstack.checkpointing import filesystem, index, manifest
from trainstack.checkpointing.abstract import Checkpoint
from trainstack.checkpointing.checksums import FileRecord, read_file
from trainstack.checkpointing.encoding import NATIVE
from trainstack.checkpointing.field_types import build, short
from trainstack.checkpointing.index import FileIndex, Joined, TensorEntry
from trainstack.checkpointing.sharded.row_grid import ChunkShare
from trainstack.checkpointing.sharded.rows import rows_of_rank
from trainstack.checkpointing.tensorfile import Rows, TensorPart, write_tensors
from trainstack.checkpointing.writing import Payload, encode, payload_of, put_file, put_texts
from trainstack.errors import CheckpointDamagedError, CheckpointError

_WHOLE_FILES = {manifest.MODEL_FILE: "model", manifest.STATE_FILE: "state"}

Layout = dict[str, tuple[torch.dtype, list[int]]]
"""dtype and shape of each tensor of a checkpoint by name."""


def pack_rows(checkpoint: Checkpoint, rank: int, size: int) -> tuple[Payload, Layout]:
    """Return the part of `checkpoint` that this rank writes, and the layout of all tensors. All ranks call it.

    Rank 0 writes the states of the ranks. `divides_rows` has to be True for each sharded tensor.

    Raises:
        UnsupportedStateError: a state contains a value that the format cannot store.
    """
    tensors, texts = encode(checkpoint, sharded=True)
    # if ranks have different states, plain tensors may differ too, and rank 0 has to write all of them
    balanced = checkpoint.rank_states is None
    layout: Layout = {}
    parts: dict[str, TensorPart] = {}
    for file, found in tensors.items():
        own, inside = rows_of_rank(found, rank, size, balanced=balanced and file in _WHOLE_FILES)
        layout |= inside
        if own:
            name = manifest.shard_file(_WHOLE_FILES[file], rank, size) if file in _WHOLE_FILES else file
            rows: dict[str, Rows] = {name: (one.whole, one.first) for name, one in own.items()}
            parts[name] = TensorPart.of({name: one.values for name, one in own.items()}, rows)
    return payload_of(checkpoint, parts, texts), layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """The report of a rank to the main process when its files are on disk.

    Attributes:
        size: of its `part-....json`.
        hash: of its bytes.
        failure: the error; "" if there is none.
    """

    size: int = 0
    hash: str = ""
    failure: str = ""

    def to_text(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> PartReport:
        """The report from a result of `to_text`. Raises ValueError."""
        return build(cls, json.loads(text))


def part_file(rank: int) -> str:
    """The name of the listing of a rank."""
    return f"part-{rank:05d}.json"


def write_part(
    temporary: Path, parts: Mapping[str, TensorPart], rank: int, abandoned: threading.Event | None = None
) -> PartReport:
    """Write the files of this rank to the directory, flush them to the disk, and list them.

    Raises:
        OSError: the file system refused.
        CheckpointError: `abandoned` was set.
    """
    files: dict[str, Any] = {}
    shares: dict[str, list[Any]] = {}

    def share(name: str, entry: TensorEntry, start: int, data: memoryview) -> None:
        if entry.size and entry.grid.chunk_at(start) != (start, start + len(data)):
            shares.setdefault(name, []).append(entry.grid.share(data, start).to_json())

    for file, part in parts.items():
        write = partial(write_tensors, part=part, on_piece=share)
        size, made = put_file(temporary, file, write, abandoned=abandoned)
        files[file] = {"size": size, **made.to_json()}
    text = index.render_listing(files, {"shares": shares})
    record = put_texts(temporary, {part_file(rank): text}, abandoned)[part_file(rank)]
    filesystem.sync_directory(temporary)
    return PartReport(size=record.size, hash=record.hash)


def join_parts(
    temporary: Path, reports: Sequence[PartReport], layout: Layout
) -> tuple[dict[str, FileIndex], dict[str, FileRecord], Joined]:
    """Read the listing of each rank. Returns the index, the records for the manifest, and the joined chunks.

    Args:
        temporary: the directory to which all ranks have written.
        reports: of the ranks, by rank.
        layout: all tensors on the main process.

    Raises:
        CheckpointError: the ranks do not have each row of each tensor once; or a listing cannot be read.
    """
    files: dict[str, FileIndex] = {}
    records: dict[str, FileRecord] = {}
    shares: dict[str, list[ChunkShare]] = {}
    for rank, report in enumerate(reports):
        path = temporary / part_file(rank)
        try:
            data = read_file(path, FileRecord(size=report.size, hash=report.hash))
            found, told = index.parse_part(data, path)
            for name, items in told["shares"].items():
                shares.setdefault(name, []).extend(map(ChunkShare.from_json, items))
        except (CheckpointDamagedError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the main process cannot read the files of rank {rank}: {error} All ranks have to save to one "
                "shared file system. Use one as save_dir, or write sharded=False."
            ) from error
        files |= found
        records |= {
            name: FileRecord(size=told["files"][name]["size"], hash=entry.combined) for name, entry in found.items()
        }
    try:
        return files, records, _join(files, layout, shares)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the ranks do not have the same state, so a checkpoint of their rows would not be whole: {error}. Return "
            "the same names from get_state() on all ranks, or write sharded=False."
        ) from error


def _join(files: dict[str, FileIndex], layout: Layout, shares: Mapping[str, list[ChunkShare]]) -> Joined:
    runs = index.runs_of(files)
    strange = sorted(runs.keys() ^ layout.keys())
    if strange:
        raise ValueError(f"{short(strange[0])} is not on all of them")
    joined: Joined = {}
    for name, entries in runs.items():
        index.check_runs(name, entries)
        dtype, shape = layout[name]
        expected = shape if dtype in NATIVE else [torch.empty(shape, dtype=dtype, device="meta").nbytes]
        if entries[0].whole != expected:
            raise ValueError(f"{short(name)} has the shape {entries[0].whole} on one and {expected} on another")
        chunks = {chunk for entry in entries for chunk in index.split_chunks(entry)}
        for chunk in sorted(chunks):
            mine = [one for one in shares.get(name, []) if chunk[0] <= one.start < chunk[1]]
            joined.setdefault(name, {})[entries[0].key(chunk)] = entries[0].grid.join(chunk, mine)
    return joined
