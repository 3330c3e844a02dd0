"""`CountingStore`: a store in the memory of this process that counts requests and bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError


class CountingStore:
    """The requests of a store of torch, with keys in a dict; any number of threads may use it.

    Attributes:
        requests: the number of messages from clients to the store.
        bytes: the size of keys and values, in both directions.
    """

    def __init__(self) -> None:
        self.requests = self.bytes = 0
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def clone(self) -> CountingStore:
        """The same store; a connection does not count as a request."""
        return self

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        with self._counted(key, value):
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """The value of an existing key."""
        with self._counted(key):
            return self._read(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of existing keys, in one request."""
        with self._counted(*keys):
            return [self._read(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Store values, in one request."""
        with self._counted(*keys, *values):
            self._values.update({key: value.encode() for key, value in zip(keys, values, strict=True)})
            self._changed.notify_all()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        with self._counted(*keys):
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a number; returns the sum."""
        with self._counted(key, "00000000"):
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def compare_set(self, key: str, before: str, value: str) -> bytes:
        """Store a value if the key has the value `before`, or no value for ""; returns the value of the key."""
        with self._counted(key, before, value):
            now = self._values.get(key)
            if (now is None and not before) or now == before.encode():
                self._values[key] = value.encode()
                self._changed.notify_all()
            return self._values.get(key, b"")

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        with self._counted(key):
            return self._values.pop(key, None) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Return once all keys exist: one request."""
        with self._counted(*keys):
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds()):
                raise DistStoreError("wait timeout")

    def _read(self, key: str) -> bytes:
        value = self._values[key]
        self.bytes += len(value)
        return value

    def _counted(self, *texts: str) -> Any:
        with self._changed:
            self.requests += 1
            self.bytes += sum(map(len, texts))
        return self._changed
