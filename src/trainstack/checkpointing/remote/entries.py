"""Checkpoints and exports in an object store: names, listing, upload, download and deletion.

An entry is a folder `<name>.<hash>` with the hash of its manifest. The manifest contains the hashes of all files, so
two processes that write the same key write the same bytes, and none can damage the files of another. The manifest is
created last. A folder without one is not an entry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from trainstack._files import MAX_SMALL_BYTES, make_directories, read_small
from trainstack.checkpointing import filesystem, manifest, temp_dirs
from trainstack.checkpointing.checksums import digest
from trainstack.checkpointing.directory import CheckpointInfo, Contents, info_of
from trainstack.checkpointing.manifest import Manifest
from trainstack.checkpointing.remote.store import ObjectStore
from trainstack.checkpointing.verification import verify_checkpoint
from trainstack.errors import CheckpointDamagedError, CheckpointMismatchError

_HASH = re.compile(r"(?<=[^/])\.[0-9a-f]{16}\Z")
_BESIDE = ("README.md", manifest.SIGNATURE_FILE)
"""Files that a manifest does not list, but that are downloaded too."""


def without_hash(key: str) -> str:
    """The path in the local copy of the entry with this key."""
    return _HASH.sub("", key)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint, an export or the beginning of a run in a store.

    Attributes:
        key: of its folder.
        content: of its manifest.
        data: the bytes of its manifest.
        files: the sizes of its objects by name; the manifest is one of them.
    """

    key: str
    content: Manifest
    data: bytes = field(repr=False)
    files: dict[str, int]

    @property
    def place(self) -> PurePosixPath:
        """Its path in the local copy, from the folder of the run: the key without the hash."""
        return PurePosixPath(without_hash(self.key))

    @property
    def is_whole(self) -> bool:
        """Whether all files exist with the sizes in the manifest."""
        return all(self.files.get(name) == record.size for name, record in self.content.files.items())

    @property
    def info(self) -> CheckpointInfo:
        """The info of a local checkpoint; its path is `place`."""
        return info_of(Path(self.place), self.content)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The content of a store below an address.

    Attributes:
        entries: those with an intact manifest, by key.
        broken: the errors of the others, by key.
        unfinished: the keys of files whose manifest was not written.
        files: the sizes of all other files by key, without leases and hidden files.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    broken: dict[str, CheckpointDamagedError | CheckpointMismatchError] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)

    def within(self, folder: str) -> tuple[Contents, dict[CheckpointInfo, Entry]]:
        """The whole entries in `folder` in the form of `directory.scan`, and the entry of each of them."""
        whole = (entry for entry in self.entries.values() if str(entry.place.parent) == folder and entry.is_whole)
        found = {entry.info: entry for entry in whole}
        infos = sorted(found, key=lambda info: (info.sequence, info.created), reverse=True)
        contents = Contents(
            intact=[info for info in infos if info.kind != "begin"],
            begun=[info for info in infos if info.kind == "begin"],
        )
        return contents, found


def key_of(place: str, data: bytes) -> str:
    """The key of the entry with the manifest `data`, which has the path `place` in the local folder."""
    return f"{place}.{digest(data)[:16]}"


def is_plain_key(key: str) -> bool:
    """Whether `key` is a path inside of a folder, without hidden names such as those of leases."""
    return not any(part.startswith(".") or not part for part in key.split("/")) and not set(key) & {"\\", "\0"}


def list_entries(store: ObjectStore, known: dict[str, Entry] | None = None) -> Listing:
    """Read the keys, and the manifests that are not in `known`. An entry never changes."""
    listing, folders = Listing(), dict[str, dict[str, int]]()
    for key, size in store.list().items():
        if is_plain_key(key):
            folder, _, name = key.rpartition("/")
            folders.setdefault(folder, {})[name] = size
    whole = {key: files for key, files in folders.items() if manifest.FILE_NAME in files}
    seen = {key: known[key] for key in whole if known and key in known and _HASH.search(key)}
    small = [key for key, files in whole.items() if key not in seen and files[manifest.FILE_NAME] <= MAX_SMALL_BYTES]
    read = store.read_many(_within(key, manifest.FILE_NAME) for key in small)
    for key, files in folders.items():
        prefix = _within(key, "")
        if key in seen:
            listing.entries[key] = replace(seen[key], files=files)
        elif key in whole:
            data = read.get(prefix + manifest.FILE_NAME)
            if data is not None or key not in small:  # otherwise it was deleted after the listing
                _sort_in(listing, store, key, files, data or b"")
        elif _HASH.search(key):
            listing.unfinished.extend(prefix + name for name in files)
        else:
            listing.files.update({prefix + name: size for name, size in files.items()})
    return listing


def _within(key: str, name: str) -> str:
    return f"{key}/{name}" if key else name


def _sort_in(listing: Listing, store: ObjectStore, key: str, files: dict[str, int], data: bytes) -> None:
    """Add the entry with the manifest `data`, which is empty if the manifest is too large."""
    try:
        content = manifest.parse(data, Path(f"{store.address}/{_within(key, manifest.FILE_NAME)}"))
        listing.entries[key] = Entry(key=key, content=content, data=data, files=files)
    except (CheckpointDamagedError, CheckpointMismatchError) as error:
        listing.broken[key] = error


def upload_folder(
    store: ObjectStore, folder: Path, key: str, data: bytes, verify_owner: Callable[[], None] = lambda: None
) -> None:
    """Upload the files of the local checkpoint `folder` as the entry `key`, and its manifest `data` last.

    `verify_owner` raises if this process may no longer write there.
    """
    prefix = _within(key, "")
    for path in sorted(folder.iterdir()):
        if path.name != manifest.FILE_NAME and path.is_file():
            store.upload(path, prefix + path.name)
    verify_owner()
    if not store.put_new(prefix + manifest.FILE_NAME, data):
        raise CheckpointDamagedError(
            f"{store.address}/{prefix}{manifest.FILE_NAME} is damaged: it is not as it was written. Delete that folder."
        )


def download(store: ObjectStore, entry: Entry, target: Path) -> Path:
    """Write an entry as the local folder `target`, completely or not at all, replacing one with this name. It is
    verified.

    Raises:
        CheckpointDamagedError: a file is missing in the store or has other bytes.
        OSError: the store or the file system refused.
    """
    make_directories(target.parent)
    made = temp_dirs.claim_temp_dir(target.parent, temp_dirs.TEMPORARY, target.name)
    prefix = _within(entry.key, "")
    try:
        filesystem.make_directory(made)
        signed = manifest.SIGNATURE_FILE in entry.files  # a signature covers all files, such as a config.json
        for name in entry.files:
            if signed or name in entry.content.files or name in _BESIDE:
                store.download(prefix + name, made / name)
        filesystem.atomic_write(made / manifest.FILE_NAME, entry.data)
        try:
            verify_checkpoint(made)
        except CheckpointDamagedError as error:
            raise CheckpointDamagedError(str(error).replace(str(made), f"{store.address}/{entry.key}")) from error
        if os.path.lexists(target):
            temp_dirs.discard_dir(target)
        filesystem.rename(made, target)
        filesystem.sync_directory(target.parent)
    finally:
        if made.exists():
            filesystem.remove_tree(made)
        temp_dirs.release_temp_dir(made)
    return target


def is_copied(entry: Entry, target: Path) -> bool:
    """Whether the local folder `target` is this entry, judged by its manifest and the sizes of its files."""
    try:
        same = read_small(target / manifest.FILE_NAME) == entry.data
        return same and all((target / name).stat().st_size == one.size for name, one in entry.content.files.items())
    except OSError:
        return False


def delete_entry(store: ObjectStore, entry: Entry) -> None:
    """Delete an entry, its manifest first: the remaining files are then not an entry."""
    prefix = _within(entry.key, "")
    store.delete([prefix + manifest.FILE_NAME])
    store.delete(prefix + name for name in entry.files if name != manifest.FILE_NAME)
