"""`first_training` runs a script until its first `Trainer.train()`, and returns that trainer."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from trainstack.errors import ConfigurationError
from trainstack.trainer import Trainer


class TrainingReached(BaseException):
    """A script has called `train()`. No `except Exception` of the script catches it.

    Attributes:
        trainer: of which it was called.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer


@contextmanager
def train_refused() -> Iterator[None]:
    """A block in which `Trainer.train` trains nothing and raises `TrainingReached`."""
    original = Trainer.train

    def train(self: Trainer, **_: Any) -> NoReturn:
        raise TrainingReached(self)

    Trainer.train = train  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.train = original  # type: ignore[method-assign]


def first_training(path: Path, words: Sequence[str]) -> Trainer | None:
    """Run a script as `python path words`, until it trains; None if it ends before.

    Args:
        path: of the script.
        words: its arguments.

    Raises:
        ConfigurationError: it ends with an exit code, such as for a missing argument.
    """
    argv, paths = sys.argv, list(sys.path)
    sys.argv = [os.fspath(path), *words]
    sys.path.insert(0, os.fspath(path.parent.resolve()))
    try:
        with train_refused():
            runpy.run_path(os.fspath(path), run_name="__main__")
    except TrainingReached as reached:
        return reached.trainer
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ConfigurationError(
                f"{path} ended with {end.code!r} before it trained. Write the arguments that it needs after --: "
                f"trainstack doctor {path} -- WORD ..."
            ) from end
    finally:
        sys.argv, sys.path[:] = argv, paths
    return None
