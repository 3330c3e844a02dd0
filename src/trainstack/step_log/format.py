"""The format of a step log: entries, details and descriptions in blocks, each chained to all blocks before it.

A file is `MAGIC` and blocks. A block is a kind (1 byte), the length of its payload (u32), the payload, and a chain of
16 bytes: BLAKE2b of the previous chain, the kind, the length and the payload. All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from hashlib import blake2b
from typing import Any

import numpy as np

FOLDER = "step_log"
"""The name of the folder of logs, in the folder of a run."""
MAGIC = b"TSSTEPS1"
CHAIN_BYTES = 16
HEAD = struct.Struct("<BI")
"""Kind and length of a block."""
MAX_PAYLOAD = 256 << 20
"""The largest payload to read. A default log has some kilobytes; details of 10 million parameters have 240 MB."""


class Kind(IntEnum):
    """The content of the payload of a block."""

    START = 1
    STEPS = 2
    DETAILS = 3
    CHECKPOINT = 4
    END = 5
    NAMES = 6


class Flag(IntFlag):
    """Properties of the entry of a step.

    Attributes:
        SKIPPED: the step moved no weights.
        NORM: `norm` is the joint L2 norm of the gradients before clipping; without it, none was computed.
        SAMPLES: `samples` is a digest; without it, the indices of the samples are not known.
        HIDDEN: the loss is not recorded, because the run is private.
    """

    SKIPPED = 1
    NORM = 2
    SAMPLES = 4
    HIDDEN = 8


ENTRY = np.dtype(
    [
        ("step", "<u8"),
        ("epoch", "<u4"),
        ("flags", "<u4"),
        ("loss", "<f8"),
        ("norm", "<f8"),
        ("samples", "<u8"),
        ("rates", "<u8"),
    ]
)
"""One global step on one rank, 48 bytes: its number, counted from 1; its epoch, from 0; `Flag`; this rank's share of
the loss; the norm of the gradients; digests of the indices of its samples and of the learning rates."""

ABSENT = (1 << 64) - 1
"""Replaces the digest of a missing tensor, such as a gradient that is None."""

_DETAILS = struct.Struct("<QBBIQ")
_BATCH, _TENSORS = 1, 2


def first_chain() -> bytes:
    """The chain before the first block."""
    return blake2b(MAGIC, digest_size=CHAIN_BYTES).digest()


def next_chain(chain: bytes, head: bytes, payload: bytes | memoryview) -> bytes:
    """The chain after a block with this head and payload, which follows `chain`."""
    digest = blake2b(chain, digest_size=CHAIN_BYTES)
    digest.update(head)
    digest.update(payload)
    return digest.digest()


@dataclass(frozen=True, kw_only=True)
class Details:
    """Digests of one global step on one rank, 64 bits each.

    Attributes:
        step: the global step.
        batch: of the micro-batches of this rank after collation, before the forward pass; None if it is unknown.
        generators: of the states of the random generators at the beginning of the step, by `Start.generators`.
        parameters: the names of the parameters of the next three, in their order.
        gradients: of each parameter's gradient after clipping, `ABSENT` for none; uint64. Empty without record="full".
        weights: of each parameter after the step.
        optimizer_states: of the state of the optimizers for each parameter after the step.
    """

    step: int
    batch: int | None
    generators: Mapping[str, int] = field(default_factory=dict)
    parameters: Sequence[str] = ()
    gradients: np.ndarray[Any, np.dtype[np.uint64]] = field(default_factory=lambda: np.empty(0, "<u8"))
    weights: np.ndarray[Any, np.dtype[np.uint64]] = field(default_factory=lambda: np.empty(0, "<u8"))
    optimizer_states: np.ndarray[Any, np.dtype[np.uint64]] = field(default_factory=lambda: np.empty(0, "<u8"))


def pack_details(
    step: int, batch: int | None, generators: Sequence[int], tensors: Sequence[Sequence[int]] = (), names: int = 0
) -> bytes:
    """The payload of a details block.

    Args:
        step: the global step.
        batch: the digest of the batch; None if it is unknown.
        generators: digests in the order of `Start.generators`.
        tensors: empty, or digests of gradients, weights and optimizer states, each in the order of the names.
        names: the table of names of the tensors, counted from 0 in the segment: that of `Start.parameters`, then those
            of the blocks of names.
    """
    flags = (0 if batch is None else _BATCH) | (_TENSORS if tensors else 0)
    head = _DETAILS.pack(step, flags, len(generators), names, batch or 0)
    return head + b"".join(np.asarray(part, "<u8").tobytes() for part in (generators, *tensors))


def step_of_details(payload: bytes) -> int:
    """The global step of a details block.

    Raises:
        ValueError: the payload is not that of a details block.
    """
    if len(payload) < _DETAILS.size or (len(payload) - _DETAILS.size) % 8:
        raise ValueError("the details of a step have a wrong length")
    return int(_DETAILS.unpack_from(payload)[0])


def unpack_details(payload: bytes, generators: Sequence[str], tables: Sequence[Sequence[str]]) -> Details:
    """The details in a payload, with the names of the random generators and the tables of names of its segment.

    Raises:
        ValueError: they do not match the names.
    """
    step_of_details(payload)
    step, flags, count, table, batch = _DETAILS.unpack_from(payload)
    digests = np.frombuffer(payload, "<u8", offset=_DETAILS.size)
    names = tables[table] if flags & _TENSORS and table < len(tables) else ()
    if count != len(generators) or len(digests) != count + 3 * len(names):
        raise ValueError(f"the details of global step {step} do not fit the names of the segment")
    gradients, weights, states = digests[count:].reshape(3, len(names))
    return Details(
        step=step,
        batch=batch if flags & _BATCH else None,
        generators=dict(zip(generators, digests[:count].tolist(), strict=True)),
        parameters=names,
        gradients=gradients,
        weights=weights,
        optimizer_states=states,
    )


@dataclass(frozen=True, kw_only=True)
class Start:
    """The beginning of a segment: a call of `train()`, new or resumed.

    Attributes:
        number: of the segment in the run, from 0; the same on all ranks.
        run_id: of the run, as in its checkpoints.
        rank, world_size: of the process that writes the log.
        backend: the backend string.
        resumed_step: the global step after which the segment begins; 0 for a new run.
        mode: "steps" or "full".
        parameters: the names of the module's parameters.
        generators: the names of the random generators whose states are digested.
        description: facts of the start as texts, by group and name: "arguments", "environment", "code", "data" and
            "weights". For a private run it contains no facts about its records.
        resumed_head: the chain of this log in the resumed checkpoint, in hexadecimal digits, if it has one.
        cut: the reason why bytes after the intact part of the log were moved to another file at the beginning of the
            segment; None if none were.
    """

    number: int
    run_id: str
    rank: int
    world_size: int
    backend: str
    resumed_step: int
    mode: str
    parameters: list[str] = field(default_factory=list)
    generators: list[str] = field(default_factory=list)
    description: dict[str, dict[str, str]] = field(default_factory=dict)
    resumed_head: str | None = None
    cut: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointNote:
    """A checkpoint that has become safe; on rank 0.

    Attributes:
        step: the global step after which it was taken.
        name: of its folder.
        root: the hash over all its tensors, as in its manifest; None if the checkpointer keeps none.
        manifest: the hash of the bytes of its manifest; None without one.
        head: the chain of this log in the checkpoint, in hexadecimal digits.
    """

    step: int
    name: str
    root: str | None = None
    manifest: str | None = None
    head: str | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of a segment that was not killed.

    Attributes:
        step: global steps finished.
        status: "finished", "stopped", "interrupted" or "failed".
    """

    step: int
    status: str


def to_json(value: Any) -> bytes:
    """The payload of a block of JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
