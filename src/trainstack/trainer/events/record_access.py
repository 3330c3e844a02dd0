"""Refusal of hooks and subscribers that would get single records of a private run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from trainstack.errors import PrivacyError

RECORDS = frozenset({"batch", "outputs", "loss"})
"""The arguments of events that hold records of one step, or values of them."""


def refuse_records(function: Callable[..., Any], label: str, public: int, given: Sequence[str]) -> None:
    """Refuse a function that cannot be called without the records of a private run.

    Args:
        function: a hook or a subscriber.
        label: its name in the message.
        public: how many arguments it can be given.
        given: the names of the arguments that it cannot be given.

    Raises:
        PrivacyError: it needs more than `public` arguments by position.
    """
    try:
        inspect.signature(function).bind(*range(public))
    except (TypeError, ValueError) as error:
        raise PrivacyError(
            f"{label} takes {' and '.join(given)} of training, which a private run gives to no hook and no subscriber: "
            "a hook that keeps records or writes them into the module carries them into later steps without clipping "
            "and noise. Leave the argument out, or write "
            "DifferentialPrivacyArguments(expose_records=True), which makes the run NOT PRIVATE."
        ) from error
