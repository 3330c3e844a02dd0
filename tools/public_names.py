"""Check that each public name has a docstring, with its parameters, and is in the API reference of the built site.

`python tools/public_names.py build/site` reads the inventory `objects.inv` of mkdocstrings there.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

PACKAGES = (
    "trainstack",
    "trainstack.trainer",
    "trainstack.trainer.callbacks",
    "trainstack.trainer.schedulers",
    "trainstack.trainer.schedulers.placeholders",
    "trainstack.backends",
    "trainstack.checkpointing",
    "trainstack.step_log",
    "trainstack.replaying",
    "trainstack.verifying",
    "trainstack.testing",
)
_METHODS = (FunctionType, property, cached_property, classmethod, staticmethod)


def names_of(package: str) -> dict[str, object]:
    """The public names of a package: `__all__`, or the names defined there without an underscore."""
    module = importlib.import_module(package)
    public = getattr(module, "__all__", None)
    if public is None:
        public = [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", None) == package]
    return {name: getattr(module, name) for name in public if name != "__version__"}


def undocumented() -> list[str]:
    """Public classes, functions, methods and modules without a docstring. Constants have none at run time."""
    missing = set()
    for package in PACKAGES:
        for name, value in names_of(package).items():
            if (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)) and not value.__doc__:
                missing.add(f"{package}.{name}")
            if inspect.isclass(value):
                missing |= {f"{package}.{name}.{method}" for method in undocumented_methods(value)}
    return sorted(missing)


def undocumented_methods(owner: type) -> list[str]:
    """Public methods and properties of a class, inherited ones included, without a docstring here or in a base.

    Methods with the name of an event are documented by `Event`.
    """
    events = {f"on_{event.value}" for event in importlib.import_module("trainstack").Event}
    own = {name: base for base in owner.__mro__ if base.__module__.startswith("trainstack") for name in vars(base)}
    return [
        name
        for name in own
        if not name.startswith("_")
        and name not in events
        and isinstance(inspect.getattr_static(owner, name), _METHODS)
        and not inspect.getdoc(getattr(owner, name))
    ]


def without_args() -> list[str]:
    """Public functions, and methods of `Trainer`, whose docstring does not describe their parameters."""
    trainer = importlib.import_module("trainstack").Trainer
    named = {
        f"Trainer.{name}": value for name, value in inspect.getmembers(trainer, inspect.isroutine) if name[0] != "_"
    }
    for package in PACKAGES:
        named |= {name: value for name, value in names_of(package).items() if inspect.isroutine(value)}
    return sorted(name for name, value in named.items() if not describes_parameters(value))


def describes_parameters(function: Callable[..., Any]) -> bool:
    """Whether a docstring has an `Args` section, refers to that of another function, or its summary has all names."""
    text = inspect.getdoc(function) or ""
    summary = text.partition("\n\n")[0]
    if re.search("^Args:$", text, re.M) or re.search(r"[Aa]rguments .*(as in|those of) `", summary):
        return True
    parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    return all(re.search(rf"`\*{{0,2}}{name}\b", summary) for name in parameters)


def inventory(site: Path) -> set[str]:
    """The names with an entry in the documentation in `site`."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]  # after four lines of text
    return {line.split(" ", 1)[0] for line in zlib.decompress(packed).decode("utf-8").splitlines()}


def unlisted(entries: set[str]) -> list[str]:
    """Public names without an entry, neither for the imported name nor for the name at the definition."""
    missing = []
    for package in PACKAGES:
        for name, value in names_of(package).items():
            home = value.__name__ if inspect.ismodule(value) else f"{getattr(value, '__module__', package)}.{name}"
            if not {f"{package}.{name}", home} & entries:
                missing.append(f"{package}.{name}")
    return sorted(missing)


def main() -> None:
    """Print the faults, or the number of names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("site", type=Path, help="the output folder of `mkdocs build`")
    entries = inventory(parser.parse_args().site)
    wrong = [f"{name} has no docstring" for name in undocumented()]
    wrong += [f"{name} does not describe its parameters: write an Args section" for name in without_args()]
    wrong += [f"{name} is not in the API reference" for name in unlisted(entries)]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"all {sum(len(names_of(package)) for package in PACKAGES)} public names are documented")


if __name__ == "__main__":
    main()
