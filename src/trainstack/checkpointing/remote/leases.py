"""`RemoteLeases` stores the leases of a run in an object store."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainstack.checkpointing.lease_file import LeasePlace, LeaseRecord, Seen, parse
from trainstack.checkpointing.remote.store import ObjectStore
from trainstack.errors import CheckpointError

BEAT_S = 10.0
"""The longest time between two heartbeats; longer than for a folder, because each is a request that costs money."""

FOLDER = ".lease"
_NAME = re.compile(rf"{re.escape(FOLDER)}/(\d{{9,18}})\.json")


def _key(counter: int) -> str:
    return f"{FOLDER}/{counter:09d}.json"


@dataclass(frozen=True, slots=True)
class RemoteLeases(LeasePlace):
    """Leases at the address of a run. A conditional request creates each, so of several processes one succeeds."""

    store: ObjectStore

    def __str__(self) -> str:
        return self.store.address

    def _counters(self) -> list[int]:
        return [int(match[1]) for key in self.store.list(FOLDER) if (match := _NAME.fullmatch(key))]

    def look(self) -> Seen | None:
        while counters := self._counters():
            with suppress(FileNotFoundError):  # a successor has deleted it
                data = self.store.read(_key(max(counters)))
                return Seen(counter=max(counters), data=data, record=parse(data))
        return None

    def claim(self, record: LeaseRecord) -> bool:
        key = _key(record.counter)
        if not self.store.put_new(key, record.render()):
            return False
        if self.store.put_new(key, replace(record, token="another").render()):
            self.store.delete([key])
            raise CheckpointError(
                f"{self}: this store ignores the condition of a request that creates an object (If-None-Match), "
                "so two processes could write the same run. Use a store that supports it: Amazon S3, Google Cloud "
                "Storage, or a recent MinIO."
            )
        return True

    def overwrite(self, record: LeaseRecord) -> bool:
        # This may restore a lease that a successor has deleted, which has no effect: its counter is lower.
        self.store.put(_key(record.counter), record.render())
        return True

    def clear(self, record: LeaseRecord) -> None:
        with suppress(OSError):
            self.store.delete([_key(counter) for counter in self._counters() if counter < record.counter])

    def give_up(self, record: LeaseRecord, made: list[Path]) -> None:
        self.overwrite(replace(record, released=True))

    def make(self) -> list[Path]:
        return []
