"""`ObjectStore` reads and writes the objects below one address, such as `s3://bucket/run`, with fsspec."""

from __future__ import annotations

import importlib.util
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from trainstack._files import REMOTE_SCHEMES, make_directories
from trainstack.errors import MissingExtraError, TrainstackError

_creating = threading.Lock()
"""Needed for `memory://`, which looks for an object and then creates it; other stores do both at once."""


def require_store(address: str) -> None:
    """Raise `MissingExtraError` if a package for this address is not installed. Imports none."""
    scheme = address.partition("://")[0]
    needed, extra = REMOTE_SCHEMES[scheme]
    for package in ("fsspec", needed):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(f"{scheme}://", package, extra)


class ObjectStore:
    """The objects below `address`. A key is a path relative to it, with slashes.

    Credentials and endpoints come from the environment and the files of the packages, not from arguments. Every failure
    is an OSError.

    Args:
        address: such as `s3://bucket/run`; of a scheme that `require_store` accepts.
        moved: called with a number of bytes while an object is uploaded.
    """

    address: str

    def __init__(self, address: str, moved: Callable[[int], None] = lambda count: None) -> None:
        self.address, self._moved = address.rstrip("/"), moved

    @cached_property
    def _files(self) -> Any:
        import fsspec

        # Other processes write too, so listings must not be cached.
        return fsspec.filesystem(self.address.partition("://")[0], use_listings_cache=False, skip_instance_cache=True)

    def _path(self, key: str) -> str:
        return str(self._files._strip_protocol(f"{self.address}/{key}" if key else self.address))

    def list(self, below: str = "") -> dict[str, int]:
        """The keys below the folder `below`, and the sizes of their objects in bytes."""
        root, found = self._path("").rstrip("/") + "/", {}
        with self._errors("listed"), suppress(FileNotFoundError):
            found = self._files.find(self._path(below), detail=True)
        return {path[len(root) :]: int(info["size"]) for path, info in found.items() if path.startswith(root)}

    def read(self, key: str) -> bytes:
        """The content of an object. Raises FileNotFoundError if it does not exist."""
        with self._errors("read"):
            return bytes(self._files.cat_file(self._path(key)))

    def read_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The contents of several objects, read concurrently. Missing objects are omitted."""
        paths = {self._path(key): key for key in keys}
        found: dict[str, bytes] = {}
        with self._errors("read"):
            answers = self._files.cat(list(paths), on_error="return") if paths else {}
            for path, answer in answers.items():
                if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
                    raise answer
                if not isinstance(answer, Exception):
                    found[paths[path]] = bytes(answer)
        return found

    def download(self, key: str, path: Path) -> None:
        """Write an object to the file `path`, durably."""
        with self._errors("read"):
            self._files.get_file(self._path(key), os.fspath(path))
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    def replace_file(self, key: str, path: Path) -> None:
        """Download an object as the file `path`, replacing it atomically."""
        make_directories(path.parent)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            self.download(key, aside)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing an existing one."""
        with self._errors("written"):
            self._files.pipe_file(self._path(key), data)
        self._moved(len(data))

    def upload(self, path: Path, key: str) -> None:
        """Write the file `path` as an object, replacing an existing one."""
        from fsspec.callbacks import Callback

        moved = self._moved

        class Counter(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                moved(inc)

        with self._errors("written"):
            self._files.put_file(os.fspath(path), self._path(key), callback=Counter())

    def put_new(self, key: str, data: bytes) -> bool:
        """Create an object by one conditional request. False if it exists with other content.

        Equal content counts as created, because a request is repeated if its answer was lost.
        """
        with self._errors("written"), _creating:
            try:
                self._files.pipe_file(self._path(key), data, mode="create")
            except Exception as error:  # FileExistsError, or the error of a package for status 409 or 412
                try:
                    return self.read(key) == data
                except OSError:
                    raise error from None
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects one after the other. Missing objects are ignored."""
        for key in keys:
            with self._errors("deleted"), suppress(FileNotFoundError):
                self._files.rm_file(self._path(key))

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except (TrainstackError, FileExistsError):
            raise
        except FileNotFoundError as error:
            if done == "read":
                raise
            raise OSError(f"{self.address} cannot be {done}: {error}") from error
        except Exception as error:  # the packages below fsspec raise other classes
            words = f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise OSError(f"{self.address} cannot be {done}: {words}") from error
