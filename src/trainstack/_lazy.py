"""Package attributes that are imported on first access."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def lazy_imports(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`.

    Args:
        package: its `__name__`.
        places: the module in which each name is found; a name that is itself a module is found at its own place.
    """

    def get(name: str) -> Any:
        if name not in places:
            module = sys.modules[package]  # for the hint of Python's own: "Did you mean: ...?"
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        place = places[name]
        with gc_paused():
            module = import_module(place)
        value = module if place == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get


@contextmanager
def gc_paused() -> Iterator[None]:
    """A block of imports, without the garbage collector: what they make stays, and to look through all of torch's
    modules again and again is a third of the time that they take."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
