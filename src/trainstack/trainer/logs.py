"""A run's messages: logged under "trainstack", each run with a threshold of its own."""

from __future__ import annotations

import logging

_logger = logging.getLogger("trainstack")
_logger.setLevel(logging.DEBUG)  # each run filters for itself; handlers filter for the user


class RunLogger:
    """Logs what reaches `level`, so that two runs in one process can differ.

    Args:
        level: `"DEBUG"`, `"INFO"`, `"WARNING"` or `"ERROR"`.
    """

    def __init__(self, level: str = "INFO") -> None:
        self._level: int = getattr(logging, level)

    def info(self, message: str) -> None:
        """Say something that is good to know."""
        self._log(logging.INFO, message)

    def warning(self, message: str) -> None:
        """Say something that may be a mistake."""
        self._log(logging.WARNING, message)

    def _log(self, level: int, message: str) -> None:
        if level >= self._level:
            _logger.log(level, message)
