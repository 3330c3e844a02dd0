"""`getlogger` gives a logger that writes to the console."""

from __future__ import annotations

import logging
import sys


class _Console(logging.Handler):
    """Writes to the standard error that is current."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")


_console = _Console()
_console.setFormatter(logging.Formatter("%(asctime)s:%(levelname)s : %(name)s : %(lineno)d : %(message)s"))


def getlogger(name: str, log_level: int | str = "INFO") -> logging.Logger:
    """The logger `name` at `log_level`, with a handler that writes to the console; the handler is added once."""
    logger = logging.getLogger(name)
    logger.setLevel(log_level)
    if _console not in logger.handlers:
        logger.addHandler(_console)
    return logger
