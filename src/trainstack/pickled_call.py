"""A call that goes to a new process: what can be sent there, and where none may be started."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from trainstack.errors import ConfigurationError


def refuse_nesting(caller: str) -> None:
    """Refuse `caller`, such as "launch()", in a process that is itself one of those it would start.

    Raises:
        ConfigurationError: saying where to put the call.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            f"{caller} was called while a new process imported the script that calls it. Put the call below\n\n"
            "    if __name__ == '__main__':\n\nso that only the script itself makes it."
        )
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        raise ConfigurationError(
            f"{caller} was called in a process that torchrun or launch() has started: each of them would start more. "
            "Call the function itself here, or start the script with python alone."
        )


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], caller: str) -> bytes:
    """`fn` and its arguments, as a new process can take them.

    Raises:
        ConfigurationError: it could not; the message says what to give `caller` instead.
    """
    name = getattr(fn, "__qualname__", repr(fn))
    main = sys.modules["__main__"]
    from_main = getattr(fn, "__module__", None) == "__main__"
    if from_main and not hasattr(main, "__file__") and getattr(main, "__spec__", None) is None:
        raise ConfigurationError(
            f"{caller}({name}): new processes cannot import a function from a notebook or an interactive session. "
            "Write it to a file (in a notebook: %%writefile training.py) and import it from there."
        )
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise ConfigurationError(
            f"{caller}({name}): the function and its arguments go to new processes by pickle, which refuses: {error}. "
            "Give a function defined at the top of a module, no lambda, no inner function, no method of a "
            "trainer, and arguments that are plain data; build models and loaders inside it."
        ) from error
