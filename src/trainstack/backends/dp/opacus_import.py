"""Importing opacus without what it does to everyone else's logging and warnings."""

from __future__ import annotations

import importlib
import logging
import warnings
from types import ModuleType

from trainstack.errors import MissingExtraError


def import_opacus(name: str, feature: str) -> ModuleType:
    """The module `name`, such as `"opacus.grad_sample"`.

    On import opacus calls `logging.basicConfig`, which would decide for the whole program how it logs; the handlers
    and the level of the root logger are put back.

    Args:
        name: a module of opacus.
        feature: what needs it, for the error.

    Raises:
        MissingExtraError: opacus is not installed.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "opacus":
            raise
        raise MissingExtraError(feature, "opacus", "dp") from error
    finally:
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        root.setLevel(level)
