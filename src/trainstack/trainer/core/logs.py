"""Log messages of a run with the logger "trainstack", filtered by the run's own level."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

_logger = logging.getLogger("trainstack")


class _LastResort(logging.NullHandler):
    """Does nothing if the application has configured a handler; otherwise warnings go to stderr.

    Python does the same for a logger without handlers. A plain `NullHandler` would hide the warnings.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        last = logging.lastResort
        if _logger.handlers == [self] and not logging.getLogger().handlers and last is not None:
            return record.levelno >= last.level and bool(last.handle(record))
        return True


_logger.addHandler(_LastResort())


class RunLogger:
    """Logs messages at `level` or above. The level belongs to the run, so two runs in one process can differ.

    The library sets no level on the logger "trainstack". A level that the application sets there or on the root logger
    also applies.

    Args:
        level: `"DEBUG"`, `"INFO"`, `"WARNING"`, `"ERROR"` or a name from `logging.addLevelName`.
    """

    def __init__(self, level: str = "INFO") -> None:
        self._level: int = logging.getLevelName(level)

    def info(self, message: str) -> None:
        """Log useful information."""
        self.log(logging.INFO, message)

    def warning(self, message: str) -> None:
        """Log a possible mistake."""
        self.log(logging.WARNING, message)

    def log(self, level: int, message: str) -> None:
        """Log `message` at a level of the logging module."""
        if level >= self._level:
            _logger.log(level, message)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings: `{"a": {"b": 1}}` yields `("a.b", 1)`."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_jsonable(values: dict[str, Any]) -> Any:
    """Convert `values` to JSON types; a value that JSON cannot represent becomes the name of its type."""
    return json.loads(json.dumps(values, default=lambda value: type(value).__name__))
