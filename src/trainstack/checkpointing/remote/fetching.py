"""Download of one checkpoint, export or file by its address, and upload of an export."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from trainstack._files import read_small
from trainstack.checkpointing import manifest
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
from trainstack.checkpointing.remote.entries import (
    Entry,
    Listing,
    delete_entry,
    download,
    is_copied,
    is_plain_key,
    list_entries,
    upload_folder,
    without_hash,
)
from trainstack.checkpointing.remote.store import ObjectStore, require_store
from trainstack.checkpointing.verification import of_run, rule_in
from trainstack.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError

_logger = logging.getLogger("trainstack")


def local_copy_of(address: str, kind: Literal["runs", "fetched"] = "runs") -> Path:
    """The default folder in the user's cache for the run at `address`, or for downloads of `fetch` from it."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    readable = re.sub(r"[^A-Za-z0-9]+", "-", address)[-60:].strip("-")
    return Path(root, "trainstack", kind, f"{readable}-{hashlib.sha256(address.encode()).hexdigest()[:16]}")


def fetch(address: str, into: Path | None = None, prefix: str | None = None) -> Path:
    """Download a checkpoint, export or file, verified, and return the local path. A complete local copy is not read
    again.

    Args:
        address: of a checkpoint, with or without the hash in its name, an export, a pointer (`last`, `best`) or another
            file; of a run or a folder of checkpoints for its newest intact checkpoint.
        into: the local folder; by default one in the user's cache.
        prefix: the `file_prefix` of checkpoints in a folder.

    Raises:
        CheckpointNotFoundError: nothing exists at the address.
        CheckpointDamagedError: it is damaged; of a folder, all checkpoints in it are.
        CheckpointError: the store cannot be read.
    """
    require_store(address)
    prefix = DefaultCheckpointerArguments().file_prefix if prefix is None else prefix
    into = local_copy_of(address, "fetched") if into is None else into
    try:
        found = _fetch_folder(address, into, prefix) or _fetch_one(address, into)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{address} cannot be read: {error}. Check the connection and the credentials."
        ) from error
    if found is None:
        raise CheckpointNotFoundError(f"{address} does not exist. Name a checkpoint, an export or a run.")
    return found


def _fetch_folder(address: str, into: Path, prefix: str) -> Path | None:
    store = ObjectStore(address)
    listing = list_entries(store)
    if "" in listing.broken:
        raise listing.broken[""]
    if "" in listing.entries:
        return _fetch_entry(store, listing.entries[""], into / without_hash(address.rpartition("/")[2]))
    for folder in ("checkpoints", "."):
        contents, entries = listing.within(folder)
        for info in of_run(contents, prefix):
            try:
                return _fetch_entry(store, entries[info], into / info.path.name)
            except CheckpointDamagedError as error:
                _logger.warning(f"skipping a damaged checkpoint: {error}")
    if listing.entries or listing.broken:
        raise CheckpointDamagedError(f"{address} has no intact checkpoint with the file_prefix {prefix!r}.")
    return None


def _fetch_one(address: str, into: Path) -> Path | None:
    folder, _, name = address.rpartition("/")
    store, target = ObjectStore(folder), into / name
    if name in ("last", "best") or "." in name:
        with suppress(FileNotFoundError):
            store.replace_file(name, target)
            rule = rule_in(target)
            if rule is None:
                return target
            contents, entries = list_entries(store).within(".")
            run = of_run(contents, rule.file_prefix)
            for info in run if rule.monitor is None else rule.monitor.rank(run):
                return _fetch_entry(store, entries[info], into / info.path.name)
    same = [one for one in list_entries(store).entries.values() if str(one.place) == name and one.is_whole]
    if not same:
        return None
    return _fetch_entry(store, max(same, key=lambda one: one.info.sequence), target)


def _fetch_entry(store: ObjectStore, entry: Entry, target: Path) -> Path:
    if not is_copied(entry, target):
        try:
            download(store, entry, target)
        except OSError:
            if not is_copied(entry, target):  # another process may have downloaded the same
                raise
    return target


def download_all(address: str, into: Path) -> None:
    """Write all files below `address` into `into`, including those of damaged checkpoints, without verification."""
    require_store(address)
    store = ObjectStore(address)
    try:
        for key in store.list():
            if is_plain_key(key):
                (into / key).parent.mkdir(parents=True, exist_ok=True)
                store.download(key, into / key)
    except OSError as error:
        raise CheckpointError(
            f"{address} cannot be read: {error}. Check the connection and the credentials."
        ) from error


def outline(address: str, into: Path) -> None:
    """Write the content of `address` into `into`: manifests, signatures, and files of zeros with the right sizes."""
    require_store(address)
    store = ObjectStore(address)
    for key, entry in _read(address).entries.items():
        folder = into / key
        folder.mkdir(parents=True, exist_ok=True)
        (folder / manifest.FILE_NAME).write_bytes(entry.data)
        for name in entry.content.files.keys() & entry.files.keys():
            with open(folder / name, "xb") as file:
                file.truncate(entry.files[name])
        if manifest.SIGNATURE_FILE in entry.files:
            store.download(f"{key}/{manifest.SIGNATURE_FILE}".lstrip("/"), folder / manifest.SIGNATURE_FILE)


def entries_at(address: str) -> list[str]:
    """The addresses of all checkpoints and exports below `address`, oldest first, and then of damaged ones."""
    require_store(address)
    listing = _read(address)
    found = sorted(listing.entries.values(), key=lambda entry: entry.info.sequence)
    return [f"{address}/{key}".rstrip("/") for key in [*(entry.key for entry in found), *listing.broken]]


def _read(address: str) -> Listing:
    try:
        return list_entries(ObjectStore(address))
    except OSError as error:
        raise CheckpointError(
            f"{address} cannot be read: {error}. Check the connection and the credentials."
        ) from error


def upload_export(folder: Path, address: str, *, overwrite: bool) -> None:
    """Upload the local export `folder` as `address`, its manifest last.

    Args:
        folder: the folder of the export.
        address: the new folder in the store, such as `s3://bucket/model`.
        overwrite: replace an export that is at the address.

    Raises:
        CheckpointError: the address contains something that is not replaced, or the store refused.
    """
    require_store(address)
    store, data = ObjectStore(address), read_small(folder / manifest.FILE_NAME)
    try:
        listing = list_entries(store)
        before, own = listing.entries.get(""), {path.name for path in folder.iterdir()}
        others = [*(listing.files.keys() - own), *(key for key in (*listing.entries, *listing.broken) if key)]
        if others:
            raise CheckpointError(f"{address} has other files ({others[0]}). Use the address of a new folder.")
        if before is not None and before.content.files == manifest.parse(data, folder).files and before.is_whole:
            return
        if before is not None and before.content.kind == "checkpoint":
            raise CheckpointError(f"{address} is a checkpoint, which an export does not replace. Use another address.")
        if (before is not None or "" in listing.broken) and not overwrite:
            raise CheckpointError(
                f"{address} is an export of another state, which is not replaced. Use another address, or write "
                "overwrite=True."
            )
        if before is not None:
            delete_entry(store, before)
        elif "" in listing.broken:
            store.delete([manifest.FILE_NAME])
        upload_folder(store, folder, "", data)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{address} cannot be written: {error}. It has no partial export.") from error
