"""`call_all` calls the subscribers of one point of a run, also where one of them raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trainstack.errors import PeerError, annotate


def call_all(calls: Iterable[Callable[..., Any]], *given: Any) -> None:
    """Call each of `calls` with what is `given`. The first exception is raised when all have been called.

    Otherwise the subscribers after the one that raised would never hear of this point: `train()`, called again, goes on
    behind it. The failure of another process is raised at once, for the collectives of this one would wait for it.
    """
    first: BaseException | None = None
    for call in calls:
        try:
            call(*given)
        except PeerError:
            raise
        except BaseException as error:  # an interrupt as well: it may come in any of them
            if first is None:
                first = error
            else:
                annotate(first, f"also: {type(error).__name__}: {error}")
    if first is not None:
        raise first
