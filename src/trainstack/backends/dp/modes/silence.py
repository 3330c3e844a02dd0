"""Warnings that torch gives in every step, and that are nothing to the user."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def silenced(message: str) -> Iterator[None]:
    """A block in which warnings that begin with `message`, a regular expression, are not shown.

    `warnings.catch_warnings` would make Python forget which warnings it has shown, so that those of the user's code,
    shown once, would come again in every step.
    """
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    mine = ("ignore", re.compile(message, re.IGNORECASE), Warning, None, 0)
    filters.insert(0, mine)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code has reset them
            filters.remove(mine)
