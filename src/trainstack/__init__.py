"""trainstack trains PyTorch models: write one module, select one backend string, run it anywhere."""

from typing import TYPE_CHECKING

from trainstack._lazy import gc_paused, lazy_imports

with gc_paused():
    from trainstack import backends, checkpointing, errors, trainer
    from trainstack.backends import *  # noqa: F403
    from trainstack.checkpointing import *  # noqa: F403
    from trainstack.errors import *  # noqa: F403
    from trainstack.ranks import main_process_first, print_once, rank_zero_only

if TYPE_CHECKING:
    from trainstack.backends.privacy_statement import PrivacyStatement
    from trainstack.launching.launch import launch
    from trainstack.trainer import *  # noqa: F403
    from trainstack.verifying import Divergence, KillEvent, ResumeReport, verify_resume

__getattr__ = lazy_imports(
    __name__,
    {
        **dict.fromkeys(trainer.__all__, "trainstack.trainer"),
        **dict.fromkeys(("KillEvent", "Divergence", "ResumeReport", "verify_resume"), "trainstack.verifying"),
        "PrivacyStatement": "trainstack.backends.privacy_statement",
        "launch": "trainstack.launching.launch",
        "verifying": "trainstack.verifying",
    },
)

__version__ = "0.1.0"

__all__ = [
    "Divergence",
    "KillEvent",
    "PrivacyStatement",
    "ResumeReport",
    "__version__",
    "errors",
    "launch",
    "main_process_first",
    "print_once",
    "rank_zero_only",
    "verify_resume",
]
__all__ += errors.__all__  # one statement a package: pyright evaluates this form alone
__all__ += backends.__all__
__all__ += checkpointing.__all__
__all__ += trainer.__all__


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
