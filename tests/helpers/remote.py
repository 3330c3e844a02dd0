"""Stores that fail, and the content of a store, for tests of remote runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainstack.checkpointing.remote.entries import Listing, list_entries
from trainstack.checkpointing.remote.fetching import fetch
from trainstack.checkpointing.remote.store import ObjectStore

WRITES = ("put", "upload", "put_new", "delete")


def fail_writes(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str, tuple[Any, ...]], bool]) -> None:
    """Make each write of a store for which `fails(name, arguments)` is true raise like a lost connection."""
    for name in WRITES:
        real = getattr(ObjectStore, name)

        def write(self: ObjectStore, *args: Any, name: str = name, real: Any = real) -> Any:
            if fails(name, args):
                raise OSError("the connection was reset")
            return real(self, *args)

        monkeypatch.setattr(ObjectStore, name, write)


def listing(address: str) -> Listing:
    """The content at an address now."""
    return list_entries(ObjectStore(address))


def places(address: str) -> list[str]:
    """The names of the checkpoints and exports at an address, without beginnings of runs."""
    found = listing(address).entries.values()
    return sorted(entry.place.name for entry in found if entry.content.kind != "begin")


def check_all_intact(address: str, folder: Path) -> int:
    """Download and verify each entry of the store; returns their number."""
    found = listing(address)
    assert not found.broken
    for number, key in enumerate(found.entries):
        fetch(f"{address}/{key}", folder / str(number))
    return len(found.entries)
