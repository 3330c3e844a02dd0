"""Every error that trainstack raises on purpose, in one tree.

TrainstackError
├── ConfigurationError (ValueError)      an argument, or a combination of arguments, is wrong
│   ├── BackendSpecError                 the backend string is wrong
│   ├── MissingExtraError (ImportError)  an optional package is needed and not installed
│   ├── ApexUnavailableError             the apex that is installed, if any, has no amp that works here
│   └── PrivacyError                     the guarantee of a private training would not hold
├── ModuleContractError (TypeError)      the user's module, optimizer or loader broke its contract
├── NonFiniteError (ArithmeticError)     a loss or gradient became inf or nan
├── PeerError (RuntimeError)             another process failed
├── ReplayMismatchError (RuntimeError)   a global step gave other bits when it was run a second time
├── LaunchError (RuntimeError)           a process that launch() started failed
├── PrivacyBudgetError (RuntimeError)    a private step would exceed the budget
└── CheckpointError                      a checkpoint cannot be written or read
    ├── CheckpointNotFoundError (FileNotFoundError)
    ├── CheckpointDamagedError           a file is missing, truncated or altered
    ├── CheckpointMismatchError          an intact checkpoint of something else
    ├── LeaseError                       another process owns the directory of the run
    ├── PrivacyLedgerError               the ledger of a private run is missing, old or damaged
    ├── SignatureError                   a signature is missing, of another key, or the files differ from it
    └── UnsupportedStateError (TypeError) a value that the format cannot hold

Preempted (SystemExit)               a signal stopped the training in good order; no error
StopTraining (Exception)             what you raise in a hook or callback to end the training; no error

Each message says what was given, what is wrong with it and what to write instead. docs/troubleshooting.md has a section
for each class, with what does not fit into a sentence.
"""

from __future__ import annotations

__all__ = [
    "ApexUnavailableError",
    "BackendSpecError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "ConfigurationError",
    "LaunchError",
    "LeaseError",
    "MissingExtraError",
    "ModuleContractError",
    "NonFiniteError",
    "PeerError",
    "Preempted",
    "PrivacyBudgetError",
    "PrivacyError",
    "PrivacyLedgerError",
    "ReplayMismatchError",
    "SignatureError",
    "StopTraining",
    "TrainstackError",
    "UnsupportedStateError",
]


class TrainstackError(Exception):
    """The root: `except TrainstackError` catches what the library itself refuses."""


class ConfigurationError(TrainstackError, ValueError):
    """An argument is wrong, or two arguments contradict each other."""


class BackendSpecError(ConfigurationError):
    """A backend string such as `"amp-sp"` does not name a legal stack."""


class MissingExtraError(ConfigurationError, ImportError):
    """A feature needs an optional package; the message names the extra to install."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'trainstack[{extra}]'"
        )


class ApexUnavailableError(ConfigurationError):
    """A backend needs `apex.amp`; the message says which apex was found and what to write instead."""


class PrivacyError(ConfigurationError):
    """The guarantee of a private training would not hold.

    Before training the message lists every reason, each with the cure. During training it is raised when a check of
    that step fails, such as a change of weights outside of the optimizers.
    """


class ModuleContractError(TrainstackError, TypeError):
    """A hook of the user's module returned something the trainer cannot work with."""


class NonFiniteError(TrainstackError, ArithmeticError):
    """A loss or a gradient is inf or nan; the message names epoch, step and batch."""


class PeerError(TrainstackError, RuntimeError):
    """Another process of the run failed; the message names its rank and carries its error."""


class ReplayMismatchError(TrainstackError, RuntimeError):
    """A global step was run twice from the same state and gave other bits; see docs/determinism.md.

    Args:
        message: what differs, and what to do.
        step: the global step, counted from 1.
        rank: of the process that saw the difference.
        quantity: `"loss"` or `"gradient"`.
        parameter: the first parameter, by name, whose gradient differs; None if only losses do.
    """

    def __init__(self, message: str, *, step: int, rank: int, quantity: str, parameter: str | None) -> None:
        super().__init__(message)
        self.step, self.rank, self.quantity, self.parameter = step, rank, quantity, parameter


class LaunchError(TrainstackError, RuntimeError):
    """A process that `launch` started failed, or could not be started.

    Args:
        message: what happened, with the traceback of the process where there is one.
        rank: the global rank of the process; None where no single one is to blame.
        exitcode: as `multiprocessing` counts: -9 for SIGKILL; None where there was none.
        child_traceback: the traceback's text; "" where the process left none.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, exitcode: int | None = None, child_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.child_traceback = child_traceback


class PrivacyBudgetError(TrainstackError, RuntimeError):
    """A private step would exceed the budget of the run or of its ledger. The step was neither charged nor taken."""


class CheckpointError(TrainstackError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was asked for."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint's files do not agree with its manifest."""


class CheckpointMismatchError(CheckpointError):
    """An intact checkpoint, but of another model, backend or data set."""


class LeaseError(CheckpointError):
    """Another process owns the directory of the run, or has taken it over from this one."""


class PrivacyLedgerError(CheckpointError):
    """The ledger of a private run is missing, older than the checkpoint, damaged, or that of another dataset."""


class SignatureError(CheckpointError):
    """A checkpoint is not signed, is signed by another key, or is not as it was signed."""


class UnsupportedStateError(CheckpointError, TypeError):
    """A state holds a value that the checkpoint format does not store."""


class Preempted(SystemExit):
    """SIGTERM, SIGHUP or SIGUSR1 stopped the training, and what was trained is saved.

    Nobody catches a `SystemExit` by accident, so the process ends with `code` unless you catch it by name.

    Attributes:
        code: 75, which sysexits.h calls EX_TEMPFAIL: run me again.
        signal: the number of the signal.
    """

    CODE = 75

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(self.CODE)
        self._message = message
        self.signal = signal

    def __str__(self) -> str:
        return self._message


class StopTraining(Exception):
    """Raise it in a hook, a callback or a function that subscribes to an event, and the training ends in good order.

    The others are still called and the step under way is finished; it is as if `trainer.request_stop` had been called.

    Args:
        reason: what `trainer.stop_reason` says afterwards.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


OTHER_RUN = (
    "resume='auto' continues a run of the same settings alone. Write resume=True to go on with those of the "
    "checkpoint, or another output_dir to begin a new run."
)
"""The end of an error about a setting that would be without effect."""


def annotate(error: BaseException, note: str) -> None:
    """Attach `note` to `error` in place; Python prints it below the traceback (from 3.11 on)."""
    notes = list(getattr(error, "__notes__", ()))
    if note not in notes:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
