"""Check that hooks and subscribers get no single records of a private run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from trainstack.errors import PrivacyError

RECORDS = frozenset({"batch", "outputs", "loss"})
"""Arguments of events that hold records of one step, or values computed from them."""


def refuse_records(function: Callable[..., Any], label: str, given: Sequence[str]) -> None:
    """Check that `function` can be called without the records of a private run.

    Args:
        function: a hook or a subscriber.
        label: its name in the message.
        given: names of the arguments that it cannot get; it gets one other.

    Raises:
        PrivacyError: it requires more than one positional argument.
    """
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise PrivacyError(
            f"{label} takes {' and '.join(given)} of training, which a private run passes to no hook and no "
            "subscriber: a hook that keeps records or writes them into the module carries them into later steps "
            "without clipping and noise. Remove the argument, or write "
            "DifferentialPrivacyArguments(expose_records=True), which makes the run NOT PRIVATE."
        ) from error
