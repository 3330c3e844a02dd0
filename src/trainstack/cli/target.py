"""Resolution of `my.py:MyModule` to a function that makes a module."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import trainstack
from trainstack.errors import ConfigurationError, LaunchError, NonFiniteError, PeerError, Preempted, TrainstackError
from trainstack.trainer import ModuleInterface

FORM = "Write FILE.py:NAME or package.module:NAME, such as my.py:MyModule."


class UserCodeError(Exception):
    """Raised from an error of the user's own code, whose traceback tells where."""


@contextmanager
def report_user_errors() -> Iterator[None]:
    """Turn an error into `UserCodeError`, unless the library or the system refused the command line.

    A `TrainstackError` or `OSError` without a frame of a file of the user's is printed as one line. A failure in
    the middle of a training, or in another process, keeps its text. An exit of the user's code is an error too:
    otherwise its code would be that of the command, and 0 would say that the command has succeeded.
    """
    try:
        yield
    except (UserCodeError, Preempted):
        raise
    except SystemExit as error:
        if _first_frame_of_user(error) is None:  # such as --help
            raise
        raise UserCodeError from _from_user(error)
    except (PeerError, LaunchError, NonFiniteError) as error:
        raise UserCodeError from _from_user(error)
    except (TrainstackError, OSError) as error:
        if _first_frame_of_user(error) is None:
            raise
        raise UserCodeError from _from_user(error)
    except Exception as error:
        raise UserCodeError from _from_user(error)


def _from_user(error: BaseException) -> BaseException:
    """`error` with the traceback from the first frame of the user's code on; unchanged without such a frame."""
    return error.with_traceback(_first_frame_of_user(error) or error.__traceback__)


def _first_frame_of_user(error: BaseException) -> TracebackType | None:
    """The outermost frame outside the library, Python and the installed packages."""
    paths = sysconfig.get_paths()
    others = [os.path.dirname(trainstack.__file__), *(paths[n] for n in ("stdlib", "platstdlib", "purelib", "platlib"))]
    roots = tuple(os.path.join(os.path.realpath(folder), "") for folder in others)
    frame = error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith("<") and not os.path.realpath(file).startswith(roots):
            break
        frame = frame.tb_next
    return frame


def load_target(target: str) -> Callable[..., Any]:
    """The class of a module, or a function that returns one, that `target` names; its file is run.

    As when Python runs a script, it can import other files of its folder. The file or package that `target` names has
    to define a function. A name that the file only imports is refused.

    Raises:
        ConfigurationError: there is no such file or name, or it is not something that makes a module.
        UserCodeError: the file raised an error.
    """
    return load_targets(target)[0]


def load_targets(*targets: str) -> list[Callable[..., Any]]:
    """`load_target` for several targets. A file or package that several of them name is run once."""
    sources = dict[str, ModuleType]()
    found = []
    for target in targets:
        place, _, name = target.rpartition(":")
        if not place or not name:
            raise ConfigurationError(f"{target!r} does not say where a module comes from. {FORM}")
        if place not in sources:
            sources[place] = _run_file(Path(place)) if place.endswith(".py") else _import(place)
        found.append(_pick(sources[place], name, target))
    return found


def _pick(source: ModuleType, name: str, target: str) -> Callable[..., Any]:
    if name not in vars(source):
        offered = _offers(source)
        close = difflib.get_close_matches(name, offered, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigurationError(f"{target}: no class or function is called {name!r}. {hint}{_in_words(offered)}")
    made_by: Any = vars(source)[name]
    why = _why_not(made_by, name, source)
    if why is not None:
        raise ConfigurationError(f"{target}: {why}. {_in_words(_offers(source))}")
    found: Callable[..., Any] = made_by
    return found


def modules_of_file(file: Path) -> list[str]:
    """The names of the modules that a file defines; the file is run.

    Raises:
        ConfigurationError: there is no such file.
    """
    return _offers(_run_file(file))


def _why_not(made_by: Any, name: str, source: ModuleType) -> str | None:
    """The reason why a value of `source` does not make a module; None if it may."""
    if isinstance(made_by, type):
        return None if issubclass(made_by, ModuleInterface) else f"the class {name} is not a ModuleInterface"
    if not inspect.isfunction(made_by):
        kind = type(made_by).__name__
        return f"{name} is {'an' if kind[0] in 'aeiou' else 'a'} {kind}, not a class or a function"
    package = source.__name__.partition(".")[0]
    home = made_by.__module__.partition(".")[0]
    if home != package or home in sys.stdlib_module_names:
        return f"the function {name} is that of the module {made_by.__module__}. Name one that is defined there"
    return None


_from_files: set[str] = set()
"""The modules that this process has made of files: another file of that name may replace one."""


def _run_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigurationError(f"there is no file {file}. {FORM}")
    known = None if file.stem in _from_files else sys.modules.get(file.stem)
    if known is not None and os.path.realpath(getattr(known, "__file__", None) or "") == os.path.realpath(file):
        return known  # the file of another target has imported it
    if file.stem in sys.stdlib_module_names or known is not None:
        raise ConfigurationError(
            f"{file} has the name of the module {file.stem!r}, which other code would then import from this file. "
            "Rename the file."
        )
    sys.path.insert(0, str(file.parent.resolve()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    _from_files.add(file.stem)
    sys.modules[file.stem] = source  # a loader's workers and pickle look it up by this name
    spec.loader.exec_module(source)
    return source


def _import(name: str) -> ModuleType:
    if name.startswith("."):
        raise ConfigurationError(f"{name!r} begins with a dot, and there is no package that it could belong to. {FORM}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the missing module is one that it imports
        raise ConfigurationError(f"there is no Python module {name!r} to import. {FORM}") from error


def _offers(source: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(source).items()
        if isinstance(value, type) and issubclass(value, ModuleInterface) and value.__module__ == source.__name__
    )


def _in_words(offers: list[str]) -> str:
    return f"It has the modules {', '.join(offers)}." if offers else "It has no ModuleInterface."
