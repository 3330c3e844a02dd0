"""Hosts as network namespaces, joined by a bridge, whose cables can be pulled. It needs root and `ip`."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers.patience import patience
from tests.helpers.processes import ROOT, free_port, name_of


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@functools.cache
def can_make_hosts() -> bool:
    """Whether this system lets the tests make network namespaces."""
    name = f"ts{os.getpid()}t"
    with suppress(OSError, subprocess.CalledProcessError):
        ip("netns", "add", name)
        ip("netns", "del", name)
        return shutil.which("unshare") is not None
    return False


class Hosts:
    """Several hosts, of one rank each.

    Args:
        count: the number of hosts.
        own_address: to which the name of each host resolves on that host; None for its correct address.
    """

    def __init__(self, count: int, own_address: str | None = None) -> None:
        self._tag, self.count = f"ts{os.getpid()}", count
        self._bridge = f"{self._tag}b"
        self._etc: list[Path] = []
        self.ranks: list[subprocess.Popen[bytes]] = []
        ip("netns", "add", self._bridge)
        ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", self._bridge, "link", "set", "br0", "up")
        for number in range(count):
            self._add(number, own_address or f"10.77.0.{number + 1}")

    def name(self, number: int) -> str:
        """The network namespace of a host."""
        return f"{self._tag}h{number}"

    def _add(self, number: int, own_address: str) -> None:
        name = self.name(number)
        etc = Path("/etc/netns") / name
        etc.mkdir(parents=True)
        self._etc.append(etc)
        others = [f"10.77.0.{other + 1} host{other}\n" for other in range(self.count) if other != number]
        (etc / "hosts").write_text("".join(["127.0.0.1 localhost\n", f"{own_address} host{number}\n", *others]))
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # which refuses at once
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", f"v{number}", "netns", self._bridge, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", self._bridge, "link", "set", f"v{number}", "up")
        self.plug(number)

    def plug(self, number: int) -> None:
        """Connect a host."""
        ip("-n", self._bridge, "link", "set", f"v{number}", "master", "br0")

    def pull(self, number: int) -> None:
        """Cut a host off. Packets are lost without a message."""
        ip("-n", self._bridge, "link", "set", f"v{number}", "nomaster")

    def start(self, folder: Path, function: Callable[..., Any], **options: Any) -> None:
        """Call a function in a rank on each host."""
        port = free_port()
        for number in range(self.count):
            environment = {
                **{name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"},
                "OMP_NUM_THREADS": "1",
                "RANK": str(number),
                "WORLD_SIZE": str(self.count),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": str(port),
            }
            command = [sys.executable, "-m", "tools.ranks.process"]
            command += [name_of(function), json.dumps({**options, "folder": str(folder)}), str(folder)]
            self.ranks.append(self.call(number, command, environment, folder / f"{number}.stderr"))

    def call(self, number: int, command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a host; its output is appended to a file."""
        prefix = ["ip", "netns", "exec", self.name(number), "unshare", "-u", "sh", "-c"]
        prefix += [f'hostname host{number}; exec "$@"', "sh"]
        with log.open("ab") as file:
            return subprocess.Popen([*prefix, *command], cwd=ROOT, env=environment, stdout=file, stderr=file)

    def lose(self, number: int) -> None:
        """Cut a host off and kill its processes; the other hosts get no message."""
        self.pull(number)
        found = subprocess.run(["ip", "netns", "pids", self.name(number)], capture_output=True, text=True, check=True)
        for process in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def results(self, folder: Path, seconds: float, ranks: list[int] | None = None) -> list[Any]:
        """The results of these ranks within a time."""
        deadline = time.monotonic() + patience(seconds)
        found = []
        for number in range(self.count) if ranks is None else ranks:
            answer = folder / f"{number}.json"
            while not answer.exists() and self.ranks[number].poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert answer.exists(), (folder / f"{number}.stderr").read_text()[-3000:]
            found.append(json.loads(answer.read_text()))
        return found

    def close(self) -> None:
        """End all ranks, and remove the hosts."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
        for name in [*map(self.name, range(self.count)), self._bridge]:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
        for etc in self._etc:
            shutil.rmtree(etc, ignore_errors=True)
