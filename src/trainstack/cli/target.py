"""Resolution of `my.py:MyModule` to a function that makes a module."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from trainstack.errors import ConfigurationError, TrainstackError
from trainstack.trainer import ModuleInterface

FORM = "Write FILE.py:NAME or package.module:NAME, such as my.py:MyModule."


class UserCodeError(Exception):
    """Raised from an error of the user's own code, whose traceback tells where."""


@contextmanager
def report_user_errors() -> Iterator[None]:
    """Turn the errors that a command would answer with one line into `UserCodeError`."""
    try:
        yield
    except (TrainstackError, OSError) as error:
        raise UserCodeError from error


def load_target(target: str) -> Callable[..., ModuleInterface]:
    """The class of a module, or a function that returns one, that `target` names; its file is run.

    As when Python runs a script, files beside it can be imported.

    Raises:
        ConfigurationError: there is no such file or name, or it is not something that makes a module.
        UserCodeError: the file raised an error like those.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ConfigurationError(f"{target!r} does not say where a module comes from. {FORM}")
    source = _run_file(Path(place)) if place.endswith(".py") else _import(place)
    made_by = vars(source).get(name)
    if isinstance(made_by, type) and not issubclass(made_by, ModuleInterface):
        raise ConfigurationError(f"{target}: the class {name} is not a ModuleInterface. {_offers(source)}")
    if not callable(made_by):
        close = difflib.get_close_matches(name, vars(source), n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigurationError(f"{target}: no class or function is called {name!r}. {hint}{_offers(source)}")
    return made_by


def _run_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigurationError(f"there is no file {file}. {FORM}")
    sys.path.insert(0, str(file.parent.resolve()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = source  # a loader's workers and pickle look it up by this name
    with report_user_errors():
        spec.loader.exec_module(source)
    return source


def _import(name: str) -> ModuleType:
    if name.startswith("."):
        raise ConfigurationError(f"{name!r} begins with a dot, and there is no package that it could belong to. {FORM}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with report_user_errors():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # what is missing is something that it imports
        raise ConfigurationError(f"there is no Python module {name!r} to import. {FORM}") from error


def _offers(source: ModuleType) -> str:
    own = [
        name
        for name, value in vars(source).items()
        if isinstance(value, type) and issubclass(value, ModuleInterface) and value.__module__ == source.__name__
    ]
    return f"It has the modules {', '.join(sorted(own))}." if own else "It has no ModuleInterface."
