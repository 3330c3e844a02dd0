"""Every error that trainstack raises on purpose, in one tree.

TrainstackError
├── ConfigurationError (ValueError)      an argument, or a combination of arguments, is wrong
│   ├── BackendSpecError                 the backend string is wrong
│   ├── MissingExtraError (ImportError)  an optional package is needed and not installed
│   ├── ApexUnavailableError             apex is not installed, or its amp does not work here
│   └── PrivacyError                     the privacy guarantee would not be valid
├── ModuleContractError (TypeError)      the user's module, optimizer or loader broke its contract
├── NonFiniteError (ArithmeticError)     a loss or gradient became inf or nan
├── PeerError (RuntimeError)             another process failed
├── ReplayMismatchError (RuntimeError)   a global step was run twice, with different results
├── LaunchError (RuntimeError)           a process that launch() started failed
├── PrivacyBudgetError (RuntimeError)    a private step would exceed the budget
└── CheckpointError                      a checkpoint cannot be written or read
    ├── CheckpointNotFoundError (FileNotFoundError)
    ├── CheckpointDamagedError           a file is missing, truncated or altered
    ├── CheckpointMismatchError          an intact checkpoint of another model, backend or data set
    ├── LeaseError                       another process owns the directory of the run
    ├── PrivacyLedgerError               the ledger of a private run is missing, old or damaged
    ├── SignatureError                   a signature is missing or of another key, or the files do not match it
    └── UnsupportedStateError (TypeError) a value that a checkpoint cannot store

Preempted (SystemExit)               a signal stopped the training at the end of a step; not an error
StopTraining (Exception)             raise it in a hook or callback to end the training; not an error

Each message contains the given value, the problem and the correction. docs/troubleshooting.md has a section for each
class, with details.
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
    """The base class of all errors of this library."""


class ConfigurationError(TrainstackError, ValueError):
    """An argument is wrong, or two arguments contradict each other."""


class BackendSpecError(ConfigurationError):
    """A backend string such as `"amp-sp"` is not a valid stack of backends."""


class MissingExtraError(ConfigurationError, ImportError):
    """A feature needs an optional package; the message names the extra to install."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'trainstack[{extra}]'"
        )


class ApexUnavailableError(ConfigurationError):
    """A backend needs `apex.amp`; the message has the apex that was found, and an alternative."""


class PrivacyError(ConfigurationError):
    """The privacy guarantee of the training would not be valid.

    If it is raised before training, the message lists every reason with its correction. During training it is raised
    when a check of a step fails, for example because weights were changed outside of the optimizers.
    """


class ModuleContractError(TrainstackError, TypeError):
    """A hook of the user's module returned a value that the trainer cannot use."""


class NonFiniteError(TrainstackError, ArithmeticError):
    """A loss or a gradient is inf or nan; the message has the epoch, the step and the batch."""


class PeerError(TrainstackError, RuntimeError):
    """Another process of the run failed; the message has its rank and its error."""


class ReplayMismatchError(TrainstackError, RuntimeError):
    """A global step was run twice from the same state, and the results differ in a bit; see docs/determinism.md.

    Args:
        message: the difference, and the correction.
        step: the global step, counted from 1.
        rank: the rank of the process that found the difference.
        quantity: `"loss"` or `"gradient"`.
        parameter: the name of the first parameter whose gradient differs; None if only losses differ.
    """

    def __init__(self, message: str, *, step: int, rank: int, quantity: str, parameter: str | None) -> None:
        super().__init__(message)
        self.step, self.rank, self.quantity, self.parameter = step, rank, quantity, parameter


class LaunchError(TrainstackError, RuntimeError):
    """A process that `launch` started failed, or could not be started.

    Args:
        message: the failure, with the traceback of the process if there is one.
        rank: the global rank of the process; None if the failure is not that of a single process.
        exitcode: the exit code as in `multiprocessing`, for example -9 for SIGKILL; None if there is none.
        child_traceback: the traceback of the process as text; "" if there is none.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, exitcode: int | None = None, child_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.child_traceback = child_traceback


class PrivacyBudgetError(TrainstackError, RuntimeError):
    """A private step would exceed the budget of the run or of its ledger. The step was not accounted or executed."""


class CheckpointError(TrainstackError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The requested checkpoint does not exist."""


class CheckpointDamagedError(CheckpointError):
    """The files of a checkpoint do not match its manifest."""


class CheckpointMismatchError(CheckpointError):
    """An intact checkpoint, but of another model, backend or data set."""


class LeaseError(CheckpointError):
    """Another process owns the directory of the run, or has acquired it from this process."""


class PrivacyLedgerError(CheckpointError):
    """The ledger of a private run is missing, older than the checkpoint, damaged, or that of another dataset."""


class SignatureError(CheckpointError):
    """A checkpoint is not signed, is signed with another key, or was changed after it was signed."""


class UnsupportedStateError(CheckpointError, TypeError):
    """A state contains a value that the checkpoint format cannot store."""


class Preempted(SystemExit):
    """SIGTERM, SIGHUP or SIGUSR1 stopped the training, after a checkpoint was saved.

    `except Exception` does not catch a `SystemExit`, so the process exits with `code` unless you catch this class.

    Attributes:
        code: 75, EX_TEMPFAIL in sysexits.h: a temporary failure, start the program again.
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
    """Raise it in a hook, a callback or an event handler to end the training, as `trainer.request_stop` does.

    The remaining callbacks and handlers are called, and the current step is completed.

    Args:
        reason: the value of `trainer.stop_reason` afterwards.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


OTHER_RUN = (
    "resume='auto' continues only a run with the same settings. Write resume=True to continue with the settings of the "
    "checkpoint, or another output_dir to begin a new run."
)
"""The end of an error about a setting that would have no effect."""


def annotate(error: BaseException, note: str) -> None:
    """Add `note` to the notes of `error`; Python 3.11 and later print it below the traceback."""
    notes = list(getattr(error, "__notes__", ()))
    if note not in notes:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
