"""The one place that imports opacus: it sets up the root logger and warns while it is imported, both contained here."""

from __future__ import annotations

import importlib
import logging
import warnings
from importlib import metadata
from types import ModuleType

from trainstack.errors import ConfigurationError, MissingExtraError

_OLDEST = (1, 6)
"""Before 1.6 opacus' adaptive clipping made its accountant under-report."""


def import_opacus(module: str = "opacus", feature: str = "Differential privacy") -> ModuleType:
    """Import `module`, opacus or a part of it, for `feature`; logging and the warning filters stay as they were.

    Raises:
        MissingExtraError: opacus is not installed.
        ConfigurationError: the opacus that is installed is older than 1.6.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imported = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name not in ("opacus", "scipy"):
            raise
        raise MissingExtraError(feature, missing.name, "dp") from missing
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    _check_version()
    return imported


def opacus_version() -> str:
    """The version of the opacus that is installed."""
    return metadata.version("opacus")


def _check_version() -> None:
    version = opacus_version()
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ConfigurationError(
            f"opacus {version} is installed, which is too old: before 1.6 it reports too small an epsilon with "
            "adaptive clipping. Install a newer one with: pip install 'trainstack[dp]'"
        )
