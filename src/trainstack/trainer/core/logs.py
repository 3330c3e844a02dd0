"""Log messages of a run under the logger "trainstack", filtered by the run's own level."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

_logger = logging.getLogger("trainstack")


class _LastResort(logging.NullHandler):
    """Does nothing, unless the application has configured no handler: then warnings go to stderr.

    Python does the same for a logger without handlers; a plain `NullHandler` would hide the warnings.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        last = logging.lastResort
        if _logger.handlers == [self] and not logging.getLogger().handlers and last is not None:
            return record.levelno >= last.level and bool(last.handle(record))
        return True


_logger.addHandler(_LastResort())


class RunLogger:
    """Logs what reaches `level`, so that two runs in one process can differ.

    The library sets no level on the logger "trainstack": one of the application, there or on the root logger, holds
    beside `level`.

    Args:
        level: `"DEBUG"`, `"INFO"`, `"WARNING"` or `"ERROR"`.
    """

    def __init__(self, level: str = "INFO") -> None:
        self._level: int = getattr(logging, level)

    def info(self, message: str) -> None:
        """Say something that is good to know."""
        self.log(logging.INFO, message)

    def warning(self, message: str) -> None:
        """Say something that may be a mistake."""
        self.log(logging.WARNING, message)

    def log(self, level: int, message: str) -> None:
        """Say it at a level of the logging module."""
        if level >= self._level:
            _logger.log(level, message)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`("a.b", 1)` for `{"a": {"b": 1}}`, and so on for all of `values`."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_jsonable(values: dict[str, Any]) -> Any:
    """`values` as JSON has them; what it has no word for, such as a writer, by the name of its type."""
    return json.loads(json.dumps(values, default=lambda value: type(value).__name__))
