"""`dispatch_to` calls a function for each operation of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def dispatch_to(handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """A block in which `handle(operation, args, kwargs)` is called for each operation of torch and returns its
    result."""
    from torch.utils._python_dispatch import TorchDispatchMode  # torch 2.13.0 has no public name for this class

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handle(func, args, kwargs or {})

    return Mode()  # type: ignore[no-untyped-call]
