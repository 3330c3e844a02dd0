"""`Lineage` describes the origin of a checkpoint or an export. It does not need torch.

Each manifest contains the whole chain of ancestors, so the chain is known even if retention has deleted them. An
ancestor is identified by the SHA-256 of its manifest, which contains the hashes of its files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainstack._files import read_small
from trainstack.checkpointing import manifest
from trainstack.checkpointing.directory import scan
from trainstack.checkpointing.field_types import build, short
from trainstack.checkpointing.format import Json
from trainstack.checkpointing.manifest import Manifest
from trainstack.checkpointing.verification import open_checkpoint
from trainstack.errors import CheckpointDamagedError, CheckpointError

How = Literal["resume", "resume_weights_and_optimizer", "resume_weights", "init_weights_from", "export"]
"""The use of an ancestor by a run, or by `trainstack checkpoints export`."""

MAX_ANCESTORS = 64
"""The largest number of ancestors in a manifest, the nearest ones. A run that is preempted each hour has 64 after some
days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """A checkpoint, an export or another source of weights with which a run began.

    Attributes:
        how: its use.
        name: of the folder; of weights without a manifest the name of the file or the id of the model.
        kind: "checkpoint" or "model" for an export; None without a manifest.
        run_id: of the run that wrote it; None if unknown.
        global_step: global steps finished at that time; None if unknown.
        manifest: the SHA-256 of its manifest, 64 hexadecimal digits; None without one. It is also None for the
            checkpoint of a private run, whose states depend on records.
        root: the hash over all its tensors, as in its manifest; None if `manifest` is.
    """

    how: How
    name: str
    kind: Literal["checkpoint", "model"] | None = None
    run_id: str | None = None
    global_step: int | None = None
    manifest: str | None = None
    root: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The origin of a checkpoint or an export. Run and step are fields of the manifest.

    Attributes:
        ancestors: the parent first, then its parent.
        omitted: the number of older ancestors that are omitted.
        data: facts about the training data: "length", and hashes of three samples as one digest, "samples", or the
            "fingerprint" of a dataset of Hugging Face. None for private runs, and if nothing is known.
        environment: names and values, such as the device and the versions of drivers.
        privacy_statement: the SHA-256 of the statement in the metadata, by `digest_of`; None for other runs.
    """

    ancestors: Sequence[Ancestor] = ()
    omitted: int = 0
    data: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    privacy_statement: str | None = None

    @property
    def parent(self) -> Ancestor | None:
        """The nearest ancestor; None for a run that began with new weights."""
        return self.ancestors[0] if self.ancestors else None

    def to_json(self) -> dict[str, Json]:
        """The lineage in the form of a manifest."""
        ancestors = [asdict(one) for one in self.ancestors[:MAX_ANCESTORS]]
        omitted = self.omitted + len(self.ancestors) - len(ancestors)
        own = {"data": self.data and dict(self.data), "environment": dict(self.environment)}
        return {"ancestors": ancestors, "omitted": omitted, **own, "privacy_statement": self.privacy_statement}

    @classmethod
    def from_json(cls, tree: Json) -> Lineage:
        """The lineage from a result of `to_json`; an empty one for None, which manifests of older versions have.

        Raises:
            CheckpointDamagedError: `tree` is not a lineage.
        """
        if tree is None:
            return cls()
        try:
            fields = build(_Fields, tree)
            if fields.data is not None and not all(map(_is_plain, fields.data.values())):
                raise ValueError(f"its data are wrong: {short(fields.data)}")
            ancestors = tuple(build(Ancestor, one) for one in fields.ancestors)
        except ValueError as error:
            raise CheckpointDamagedError(f"the lineage in a manifest cannot be read: {error}.") from error
        return cls(
            ancestors=ancestors,
            omitted=fields.omitted,
            data=fields.data,
            environment=fields.environment,
            privacy_statement=fields.privacy_statement,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """The JSON of a lineage."""

    ancestors: list[Any]
    omitted: int
    data: dict[str, Any] | None
    environment: dict[str, str]
    privacy_statement: str | None


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (str, int, bool)


def digest_of(tree: Json) -> str:
    """The SHA-256 of a JSON tree, written with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_lineage(path: str | os.PathLike[str]) -> Lineage:
    """The lineage in the manifest of a checkpoint or an export; an empty one if it was written without.

    Args:
        path: of the checkpoint or export.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: its manifest is damaged.
    """
    return Lineage.from_json(open_checkpoint(path)[1].lineage)


def descend(path: Path, how: How) -> Lineage:
    """The ancestors of a run that begins with the checkpoint or export at `path`: that one, and its ancestors."""
    data = read_small(path / manifest.FILE_NAME)
    content = manifest.parse(data, path / manifest.FILE_NAME)
    parent = ancestor_of(content, how, data)
    own = Lineage.from_json(content.lineage)
    return Lineage(ancestors=(parent, *own.ancestors), omitted=own.omitted)


def ancestor_of(content: Manifest, how: How, data: bytes) -> Ancestor:
    """The entry of the checkpoint or export with the manifest `content`, whose bytes are `data`."""
    is_secret = content.kind == "checkpoint" and _is_private(content)
    return Ancestor(
        how=how,
        name=content.name,
        kind="model" if content.kind == "model" else "checkpoint",
        run_id=content.run_id,
        global_step=content.global_step,
        manifest=None if is_secret else hashlib.sha256(data).hexdigest(),
        root=None if is_secret else content.root,
    )


def _is_private(content: Manifest) -> bool:
    """Whether a run with a privacy layer wrote it. Its checkpoints contain more than the guarantee covers."""
    return isinstance(content.metadata, dict) and content.metadata.get("privacy") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An ancestor with its current location.

    Attributes:
        ancestor: the entry in the descendant.
        path: its path; None if it was not found.
        replaced: the path of a checkpoint of the same name and run with another manifest.
    """

    ancestor: Ancestor
    path: Path | None
    replaced: Path | None = None

    @property
    def state(self) -> str:
        """The location as text."""
        if self.path is not None:
            return str(self.path)
        if self.replaced is not None:
            return f"gone: {self.replaced} was written later under the same name"
        return "gone" if self.ancestor.kind is not None else "not a checkpoint"


def trace(path: Path, folders: Iterable[Path] = ()) -> list[Link]:
    """The ancestors of the checkpoint or export at `path`, the parent first.

    They are searched in its parent folder, in the folders of the other runs there, and in `folders` and their children.
    """
    found = list(_candidates([*_neighbours(path), *folders]))
    return [_find(ancestor, found) for ancestor in read_lineage(path).ancestors]


def _neighbours(path: Path) -> list[Path]:
    folder = path.absolute().parent
    return [folder, folder.parent.parent] if folder.name == "checkpoints" else [folder]


def _candidates(folders: Iterable[Path]) -> Iterator[tuple[Path, Manifest, bytes]]:
    """The checkpoints and exports in folders, and in the folders of runs below them."""
    places = dict[Path, None]()
    for folder in folders:
        children = []
        with suppress(OSError):
            children = sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
        for place in (folder, *children):
            places |= dict.fromkeys((place, place / "checkpoints"))
    for place in places:
        with suppress(CheckpointError):
            for info in scan(place).intact:
                with suppress(OSError, CheckpointError):
                    data = read_small(info.path / manifest.FILE_NAME)
                    yield info.path, manifest.parse(data, info.path), data


def _find(ancestor: Ancestor, found: Sequence[tuple[Path, Manifest, bytes]]) -> Link:
    replaced = None
    for path, content, data in found:
        if (content.name, content.run_id, content.kind) != (ancestor.name, ancestor.run_id, ancestor.kind):
            continue
        if ancestor.manifest is None:  # of a private run: compare name, run and step
            same = ancestor.run_id is not None and content.global_step == ancestor.global_step
        else:
            same = hashlib.sha256(data).hexdigest() == ancestor.manifest
        if same:
            return Link(ancestor=ancestor, path=path)
        replaced = replaced or path
    return Link(ancestor=ancestor, path=None, replaced=replaced)
