"""`Manifest` lists the files of a checkpoint with sizes and hashes.

The manifest is written last, so a directory without one is unfinished. It contains its own hash, and is valid only with
exactly the written bytes: one flipped bit anywhere in it is detected.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from trainstack._files import MAX_SMALL_BYTES, read_small
from trainstack.checkpointing.checksums import ALGORITHM, FileRecord, digest, is_digest
from trainstack.checkpointing.field_types import build, short
from trainstack.checkpointing.format import Json, PlainDecoder
from trainstack.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError

FILE_NAME = "MANIFEST.json"
MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
TREE_FILE = "state.json"
INDEX_FILE = "index.json"
SIGNATURE_FILE = "SIGNATURE.json"
"""The signature over all other files of the folder. The manifest does not list it."""
FORMAT = "trainstack-checkpoint"
FORMAT_VERSION = 2
SHARDED_VERSION = 3
"""The version of checkpoints in which each rank has written its rows."""

MAX_VALUES = 500_000
"""The largest number of values in a manifest. One has some hundreds; a scan of a directory parses them all."""

Kind = Literal["checkpoint", "model", "begin"]

_SELF_HASH = "manifest_xxh3_128"
_TAIL = re.compile(rb',\n "' + _SELF_HASH.encode() + rb'": "([0-9a-f]{32})"\n}\n\Z')
_CREATED = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\+00:00")
_RANK_FILE = re.compile(r"rank-([0-9]{5})\.(json|safetensors)")
WEIGHT_MAP_FILE = "model.safetensors.index.json"
"""The file of an export in several files that maps tensors to files, in the form of `from_pretrained`."""
_EXPORT_FILE = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")
_SHARD_FILE = re.compile(r"(model|state)\.rank-([0-9]{5})-of-([0-9]{5})\.safetensors")


def rank_file(rank: int, suffix: str) -> str:
    """Return the name of a rank's file: `suffix` is "json" or "safetensors"."""
    return f"rank-{rank:05d}.{suffix}"


def shard_file(part: str, rank: int, size: int) -> str:
    """Return the name of the file with a rank's rows of "model" or "state". Rank 0 has the number 1."""
    return f"{part}.rank-{rank + 1:05d}-of-{size:05d}.safetensors"


def export_file(number: int, count: int) -> str:
    """Return the name of one file of an export in several; the first has the number 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def is_shard_file(file: str) -> bool:
    """Return whether `file` is the name of a file with the rows of one rank."""
    return _SHARD_FILE.fullmatch(file) is not None


def is_part_of(file: str, whole_file: str) -> bool:
    """Return whether `file` is `whole_file`, which is `MODEL_FILE` or `STATE_FILE`, or one of its parts."""
    match = _SHARD_FILE.fullmatch(file)
    if file == whole_file or (match is not None and f"{match[1]}.safetensors" == whole_file):
        return True
    return whole_file == MODEL_FILE and _EXPORT_FILE.fullmatch(file) is not None


def model_hash(content: Manifest) -> str:
    """Return a hash of the files with the module's tensors: the hash of a single file, or one over those of all."""
    files = sorted(name for name in content.files if is_part_of(name, MODEL_FILE))
    hashes = [content.files[name].hash for name in files]
    return hashes[0] if files == [MODEL_FILE] else digest("\n".join(hashes).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a manifest. `plan` and `metadata` are JSON trees of `StateEncoder`.

    Attributes:
        kind: "checkpoint", "model" for an export, "begin" for the beginning of a new run, which has no files.
        name: the name under which the directory was written.
        sequence: increases with every entry of the parent directory.
        run_id: of the run that wrote it; None if unknown.
        lease: the fencing counter of the lease under which it was written; 0 without one.
        global_step: finished global steps, including skipped ones; None if unknown.
        created: UTC, ISO 8601.
        versions: of the libraries.
        files: sizes and hashes of all other files.
        hash: the hash algorithm of this checkpoint.
        root: the hash over all chunks of all tensors, equal for equal tensors of equal names; None without an index.
        lineage: a result of `integrity.lineage.Lineage.to_json`; None in manifests of older versions.
        format_version: of the format.
    """

    kind: Kind
    name: str
    sequence: int
    run_id: str | None = None
    lease: int = 0
    global_step: int | None
    created: str
    versions: dict[str, str]
    plan: Json
    metadata: Json
    files: dict[str, FileRecord]
    hash: str = ALGORITHM
    root: str | None = None
    lineage: Json = None
    format_version: int = FORMAT_VERSION

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has written its rows."""
        return self.format_version == SHARDED_VERSION

    @property
    def size(self) -> int:
        """Bytes in all files except the manifest."""
        return sum(record.size for record in self.files.values())

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers in the entry "metrics" of the metadata that a float can represent; none without this entry."""
        tree = self.metadata.get("metrics") if isinstance(self.metadata, dict) else None
        found = decode_plain(tree)
        numbers = found.items() if isinstance(found, dict) else ()
        return {
            name: float(value)
            for name, value in numbers
            if type(name) is str and (type(value) is float or (type(value) is int and value.bit_length() < 1000))
        }


def now() -> str:
    """Return the time in UTC as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def decode_plain(tree: Json) -> Any:
    """Return the plan or the metadata, or a part of it, from its tree.

    Raises:
        CheckpointDamagedError: it is not a result of `StateEncoder`.
    """
    try:
        return PlainDecoder().decode(tree)
    except CheckpointDamagedError:  # it may contain a dtype or a scalar of numpy, which need these libraries
        from trainstack.checkpointing.decoding import StateDecoder

        return StateDecoder({}).decode(tree)


def is_plain_name(name: str) -> bool:
    """Return whether `name` can name a checkpoint: one part of a path, and not a hidden one."""
    return 0 < len(name) <= 255 and not name.startswith(".") and not any(mark in name for mark in "/\\\0")


def render(manifest: Manifest) -> bytes:
    """Return the bytes of MANIFEST.json.

    Raises:
        CheckpointError: the manifest exceeds the limits of reading.
    """
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)}
    body["format_version"] = SHARDED_VERSION if manifest.is_sharded else FORMAT_VERSION
    data = _render(body)
    if len(data) > MAX_SMALL_BYTES or _count_values(data) > MAX_VALUES:
        raise CheckpointError(
            f"the plan and the metadata of checkpoint {manifest.name!r} make a manifest of {len(data):,} bytes with "
            f"about {_count_values(data):,} values; {MAX_SMALL_BYTES:,} and {MAX_VALUES:,} are the limits. Put large "
            "values into a state, such as trainer.user_state."
        )
    try:
        parse(data, Path(FILE_NAME))  # never write a manifest that cannot be read
    except CheckpointDamagedError as error:
        raise CheckpointError(f"checkpoint {manifest.name!r} cannot be written: {error}") from error
    return data


def is_manifest(data: bytes) -> bool:
    """Return whether `data` is, or was before damage, a manifest of this library."""
    return FORMAT.encode() in data or _SELF_HASH.encode() in data


def read(path: Path) -> Manifest:
    """Return the manifest in the file `path`, with every field validated. No other function opens a manifest.

    It reads a regular file of at most 16 MiB, and never waits.

    Raises:
        CheckpointDamagedError: it is absent, unreadable, not a regular file, too large, or differs from the written
            one.
        CheckpointMismatchError: it was written by a newer trainstack.
    """
    try:
        data = read_small(path)
    except FileNotFoundError as error:
        raise CheckpointDamagedError(
            f"{path} is missing: the checkpoint was not finished. Load another checkpoint."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}. Load another checkpoint.") from error
    return parse(data, path)


def parse(data: bytes, path: Path) -> Manifest:
    """Return the manifest in `data`, the content of the file `path`. Raises as `read` does."""
    tail = _TAIL.search(data[-64 - len(_SELF_HASH) :])
    end = len(data) - len(tail[0]) if tail else 0
    if tail is None or digest(data[:end] + b"\n}\n") != tail[1].decode():
        raise CheckpointDamagedError(
            f"{path} is damaged: it is not as it was written: its own hash differs. Load another checkpoint."
        )
    try:
        if _count_values(data) > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} values")
        body = json.loads(data)
        if type(body) is not dict or body.get("format") != FORMAT:
            raise ValueError("it has another format")
        version = body.get("format_version")
        if type(version) is not int or version < 1:
            raise ValueError(f"its format version is {short(version)}")
        if version <= max(FORMAT_VERSION, SHARDED_VERSION):
            return _validated(body, version)
    except (ValueError, RecursionError, CheckpointDamagedError) as error:
        raise CheckpointDamagedError(f"{path} is not a manifest of a trainstack checkpoint: {error}.") from error
    raise CheckpointMismatchError(
        f"{path} has format version {short(version)}; this trainstack reads versions up to {SHARDED_VERSION}. "
        "Upgrade trainstack to load it."
    )


def _validated(body: dict[str, Any], version: int) -> Manifest:
    if type(body.get("files")) is not dict:
        raise ValueError("it has no files")
    rename = {"xxh3_128": "hash"} if version == 1 else {}
    records = {
        name: build(FileRecord, {rename.get(k, k): v for k, v in record.items()} if type(record) is dict else record)
        for name, record in body["files"].items()
    }
    content = build(Manifest, body, files=records, **({"hash": ALGORITHM, "root": None} if version == 1 else {}))
    _check_names(content)
    _check_values(content)
    return content


def _check_names(content: Manifest) -> None:
    """Refuse names that are not files of this kind of checkpoint, so that no name leads outside of the directory."""
    if not is_plain_name(content.name):
        raise ValueError(f"{short(content.name)} cannot name a checkpoint")
    required = {TREE_FILE} if content.format_version == 1 else {TREE_FILE, INDEX_FILE}
    allowed = {*required, MODEL_FILE, STATE_FILE}
    if content.kind == "begin":
        required = allowed = set()
    if content.is_sharded:
        required = required | ({WEIGHT_MAP_FILE} if content.kind == "model" else set())
        allowed = required
        _check_shards(content)
    for name in content.files:
        of_rank = content.kind == "checkpoint" and content.format_version > 1 and _RANK_FILE.fullmatch(name)
        if name not in allowed and not of_rank and not (content.is_sharded and _shard_of(content.kind, name)):
            raise ValueError(f"{short(name)} is not a file of a {content.kind}")
    missing = sorted(required - content.files.keys())
    if missing:
        raise ValueError(f"it does not list {missing[0]}")


def _check_shards(content: Manifest) -> None:
    if content.kind == "begin":
        raise ValueError("the beginning of a run has no files")
    found = [match.groups()[-2:] for name in content.files if (match := _shard_of(content.kind, name))]
    if len({count for _, count in found}) > 1 or any(not 1 <= int(number) <= int(count) for number, count in found):
        raise ValueError("the names of its files contain different numbers of files")


def _shard_of(kind: str, name: str) -> re.Match[str] | None:
    return (_EXPORT_FILE if kind == "model" else _SHARD_FILE).fullmatch(name)


def _check_values(content: Manifest) -> None:
    if content.hash != ALGORITHM:
        raise ValueError(f"its hash algorithm is {short(content.hash)}, and this trainstack supports {ALGORITHM}")
    hashes = [record.hash for record in content.files.values()]
    if content.format_version > 1 and content.kind != "begin":
        hashes.append(content.root or "")
    if not all(map(is_digest, hashes)):
        raise ValueError("one of its hashes is not a hash")
    if not _CREATED.fullmatch(content.created):
        raise ValueError(f"created={short(content.created)} is not a time in UTC")
    for name in ("plan", "metadata"):
        value = decode_plain(getattr(content, name))
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name} is a {type(value).__name__}, not a dict")


def _count_values(data: bytes) -> int:
    return data.count(b",") + data.count(b"{") + data.count(b"[")


def _render(body: dict[str, Any]) -> bytes:
    return _dump({**body, _SELF_HASH: digest(_dump(body))})


def _dump(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, allow_nan=False) + "\n").encode("ascii")
