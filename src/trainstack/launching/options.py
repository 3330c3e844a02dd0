"""Checked options of a `launch` call."""

from __future__ import annotations

import difflib
import multiprocessing
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainstack._files import local_path
from trainstack.errors import ConfigurationError

_LOOPBACK = "127.0.0.1"
_OUTPUTS = ("only_error", "all", "ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The checked arguments of one launch; see `launch`."""

    nproc: int
    min_nodes: int
    max_nodes: int
    endpoint: str
    local_addr: str
    is_host: bool | None
    max_restarts: int
    output: str
    timeout_s: float | None
    grace_s: float
    env: Mapping[str, str]

    @property
    def may_restart(self) -> bool:
        """Whether workers may be started a second time."""
        return self.max_restarts > 0 or self.min_nodes != self.max_nodes


def check_options(
    nproc: int | None,
    nnodes: str | int,
    node_rank: int | None,
    endpoint: str | None,
    max_restarts: int,
    output: str | os.PathLike[str],
    timeout_s: float | None,
    grace_s: float,
    env: Mapping[str, str] | None,
) -> LaunchOptions:
    """Check the arguments of `launch`, which documents them, and add the defaults for one machine.

    Raises:
        ConfigurationError: one of them is wrong.
    """
    least, most = _node_range(nnodes, node_rank)
    several = most > 1
    if several and (endpoint is None or not endpoint.rpartition(":")[2].isdecimal()):
        raise ConfigurationError(
            f"nnodes={nnodes!r}, rdzv_endpoint={endpoint!r}: several machines need one rendezvous address, the same on "
            "all. Write rdzv_endpoint='host:port' with the host of one machine and a port free there."
        )
    for name, value in (("max_restarts", max_restarts), ("grace_s", grace_s)):
        if value < 0:
            raise ConfigurationError(f"{name}={value}: write a number from 0 up.")
    if timeout_s is not None and timeout_s <= 0:
        raise ConfigurationError(f"timeout_s={timeout_s}: write seconds above 0, or None to wait without limit.")
    return LaunchOptions(
        nproc=_count(nproc),
        min_nodes=least,
        max_nodes=most,
        endpoint=endpoint if several and endpoint else f"{_LOOPBACK}:0",
        local_addr=_local_address_for(endpoint) if several and endpoint else _LOOPBACK,
        is_host=None if several and node_rank is None else not node_rank,
        max_restarts=max_restarts,
        output=_output(output),
        timeout_s=timeout_s,
        grace_s=grace_s,
        env=_variables(env or {}),
    )


def _node_range(nnodes: str | int, node_rank: int | None) -> tuple[int, int]:
    """The smallest and the largest number of machines."""
    first, _, last = str(nnodes).partition(":")
    if not (first.isdecimal() and (last or first).isdecimal() and 1 <= int(first) <= int(last or first)):
        raise ConfigurationError(f"nnodes={nnodes!r}: write a number of machines, '2', or a range, '1:4'.")
    least, most = int(first), int(last or first)
    if node_rank is not None and not 0 <= node_rank < most:
        raise ConfigurationError(
            f"node_rank={node_rank}, nnodes={nnodes!r}: machines are counted from 0, where rdzv_endpoint is. "
            f"Write a number from 0 to {most - 1}, or remove it for automatic detection."
        )
    return least, most


def _count(nproc: int | None) -> int:
    if nproc is None:
        nproc = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        if nproc == 0:
            raise ConfigurationError(
                "launch(): torch finds no accelerator on this machine, so the number of processes is required. "
                "Write launch(fn, nproc=2)."
            )
    if nproc < 1:
        raise ConfigurationError(f"nproc={nproc}: write a number of processes from 1 up.")
    return nproc


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise ConfigurationError(f"env={env!r}: write variables with their values, env={{'NAME': 'value'}}.")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigurationError(
                f"env={{{name!r}: {value!r}}}: names and values of variables are text. "
                f"Write env={{{str(name)!r}: {str(value)!r}}}."
            )
    return dict(env)


def _output(output: str | os.PathLike[str]) -> str:
    """A word of `_OUTPUTS`, or the path of a folder, which is made. A misspelt word is refused."""
    if output in _OUTPUTS:
        return str(output)
    words = ", ".join(map(repr, _OUTPUTS))
    try:
        folder = local_path(output, "rank_output").absolute()
        is_word = isinstance(output, str) and os.sep not in output and not folder.is_dir()
        if is_word and difflib.get_close_matches(str(output), _OUTPUTS):
            raise ConfigurationError(f"rank_output={output!r}: write one of {words}, or a folder: './{output}'.")
        folder.mkdir(parents=True, exist_ok=True)
    except (TypeError, OSError) as error:
        raise ConfigurationError(f"rank_output={output!r}: {error}. Write one of {words}, or a folder.") from error
    return str(folder)


def _local_address_for(endpoint: str) -> str:
    """The address of this machine on the route to the rendezvous. Unlike the host's name, others can reach it.

    No packet is sent. If it is a loopback address, the result is the host of `endpoint`, the name that the others use.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(f"rdzv_endpoint={endpoint!r}: this machine has no route to it ({error}).") from error
    return host if found.startswith("127.") or found == "::1" else found


def check_not_in_worker(caller: str) -> None:
    """Refuse a call of `caller`, such as "launch()", in a process that such a call has started.

    Raises:
        ConfigurationError: the message says where to put the call.
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
    """Pickle `fn` and its arguments for a new process.

    Raises:
        ConfigurationError: they cannot be pickled. The message says how to call `caller` instead.
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
            f"{caller}({name}): the function and its arguments are sent to new processes by pickle, which refuses: "
            f"{error}. Pass a function defined at the top of a module, not a lambda, an inner function or a method of "
            "a trainer, and arguments that are plain data; build models and loaders inside it."
        ) from error
