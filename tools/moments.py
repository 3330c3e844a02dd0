"""Cache the moments of opacus, which private runs compute again for each statement: half of the time of short runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from trainstack.backends.dp.epsilon import import_opacus

_MODULE = "opacus.accountants.analysis.rdp"
_FUNCTION = "_compute_log_a"
"""It is private (opacus 1.6.0), and depends only on its arguments: sampling rate, noise and order."""


@functools.cache
def _cached() -> Callable[..., float]:
    return functools.cache(getattr(import_opacus(_MODULE), _FUNCTION))


@contextmanager
def cached_moments() -> Iterator[None]:
    """A block in which opacus computes each moment once.

    Raises:
        MissingExtraError: opacus is not installed.
    """
    with mock.patch(f"{_MODULE}.{_FUNCTION}", _cached()):
        yield
