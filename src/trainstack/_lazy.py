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
        places: the module that defines each name. For a name that is itself a submodule, its full module name.
    """

    def get(name: str) -> Any:
        if name not in places:
            module = sys.modules[package]  # Python needs it for its hint "Did you mean: ...?"
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
    """Disable the garbage collector during a block of imports.

    Imports create objects that are not released, and the repeated collections take a third of the import time of torch.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
