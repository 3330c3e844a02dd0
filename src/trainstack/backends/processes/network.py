"""Addresses and network interfaces of this host, and the choice of the interface for gloo."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trainstack._store import LOOPBACK
from trainstack.errors import ConfigurationError

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux, <linux/sockios.h>: get the address of an interface
_log = logging.getLogger("trainstack")


def local_address_to(host: str) -> str | None:
    """The address of this host on the route to another one; no packet is sent. None if there is no route."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interfaces() -> dict[str, list[str]]:
    """The network interfaces of this host with their addresses. The addresses are known on Linux only."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    if sys.platform != "linux":
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in found:
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name].append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    return found


def is_loopback(address: str) -> bool:
    """Whether an address belongs to the loopback device."""
    return address.startswith("127.") or address == "::1"


def choose_interface(hosts: Sequence[str], one_host: bool, address: str, environ: Mapping[str, str]) -> str | None:
    """The interface on which gloo has to listen; None if gloo's own choice is right.

    gloo uses the address to which the host name resolves. On Debian and Ubuntu that is often 127.0.1.1.

    Args:
        hosts: of all ranks, by rank.
        one_host: whether all ranks are on this host.
        address: of this host, at which the others can reach it.
        environ: may contain a choice of the user.

    Raises:
        ConfigurationError: the chosen interface does not exist, or no reachable address is known.
    """
    here, chosen = interfaces(), environ.get(VARIABLE, "")
    listed = ", ".join(" ".join([name, *addresses]) for name, addresses in here.items())
    if chosen:
        missing = [name for name in chosen.split(",") if name not in here]
        if missing:
            raise ConfigurationError(
                f"{VARIABLE}={chosen}: {socket.gethostname()} has no interface {missing[0]!r}. Write one of its "
                f"interfaces, or unset the variable: {listed}."
            )
        return None
    if one_host:
        return _interface_of(LOOPBACK, here)
    own = _address_of_own_name()
    if own == address or len(set(hosts)) == 1:
        return None
    found = None if is_loopback(address) else _interface_of(address, here)
    if found is None and (own is None or is_loopback(own)):
        raise ConfigurationError(
            f"the ranks are on several hosts, and the name of this one, {socket.gethostname()}, "
            f"{'cannot be resolved' if own is None else f'resolves to {own}'}: the others cannot reach it there. "
            f"Set {VARIABLE} to the interface at which they can (interfaces here: {listed})."
        )
    if found is not None:
        _log.info("gloo on %s listens on %s (%s), not on %s", socket.gethostname(), found, address, own)
    return found


def _interface_of(address: str, here: Mapping[str, Sequence[str]]) -> str | None:
    return next((name for name, addresses in here.items() if address in addresses), None)


def _address_of_own_name() -> str | None:
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def use_interface(name: str | None) -> None:
    """Make gloo listen on this interface from now on; None removes the choice."""
    if name is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = name


EAGER_RANKS = 64
"""Up to this number of ranks, gloo connects all pairs when a group is made. With more, two ranks connect when they
first communicate: 1,000 ranks would read 10**6 addresses from the store, and need more open files than systems
allow."""

_LAZY = "TORCH_GLOO_LAZY_INIT"


def connects_lazily(size: int) -> bool:
    """Whether groups of `size` ranks are made without connections. A setting of the user takes precedence."""
    return os.environ.get(_LAZY, "1" if size > EAGER_RANKS else "0").lower() in ("1", "y", "yes", "t", "true")


@contextmanager
def connections_for(size: int) -> Iterator[None]:
    """A block in which groups of `size` ranks are made. torch 2.13.0 reads the variable for each group."""
    if _LAZY in os.environ or not connects_lazily(size):
        yield
        return
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_LAZY, None)
