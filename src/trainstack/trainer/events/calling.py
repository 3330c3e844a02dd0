"""`call_all` calls the subscribers of one point of a run, even if one of them raises an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trainstack.errors import PeerError, annotate


def call_all(calls: Iterable[Callable[..., Any]], *given: Any) -> None:
    """Call each of `calls` with the arguments `given`, and then raise the first exception.

    All subscribers must be called, because a second call of `train()` continues after this point: the others would miss
    it. A failure of another process is raised immediately, because the collectives of this process would wait for it.
    """
    first: BaseException | None = None
    for call in calls:
        try:
            call(*given)
        except PeerError:
            raise
        except BaseException as error:  # includes KeyboardInterrupt, which may occur in any of the calls
            if first is None:
                first = error
            else:
                annotate(first, f"also: {type(error).__name__}: {error}")
    if first is not None:
        raise first
