"""The time that a scheduler leaves a run to save itself, held against the time that saving takes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainstack.trainer.logs import RunLogger

_USUAL_GRACE_S = 30.0  # torchrun, Kubernetes, and SLURM's KillWait


class Grace:
    """Warns, once, of saves that take so long that a run may be killed in the middle of its last one.

    Args:
        seconds: from the signal to the kill; None for what the launcher says, or 30.
        environ: where to look for what the launcher says.

    Attributes:
        seconds: from the signal to the kill.
    """

    def __init__(self, seconds: float | None, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.seconds = seconds or _seconds_in(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")) or _USUAL_GRACE_S
        self._warned = False

    def saved_in(self, seconds: float, log: RunLogger) -> None:
        """A save took `seconds`."""
        if seconds <= self.seconds / 2 or self._warned:
            return
        self._warned = True
        log.warning(
            f"saving a checkpoint took {seconds:.1f} s. A run that has to stop is killed after {self.seconds:g} s, "
            "and has to finish its step before it saves. Ask for more time (torchrun --shutdown-timeout, "
            "launch(grace_s=...), SLURM --signal=USR1@<seconds>, terminationGracePeriodSeconds), and write it as "
            "TrainerArguments(stop_grace_s=...)."
        )


def _seconds_in(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
