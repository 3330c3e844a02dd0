"""Checked access to a launcher's environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from trainstack.errors import ConfigurationError


class Variables:
    """The environment variables of one launcher.

    Args:
        environ: all variables.
        launcher: the name of the launcher, for errors.
    """

    def __init__(self, environ: Mapping[str, str], launcher: str) -> None:
        self._environ = environ
        self._launcher = launcher

    def has(self, name: str) -> bool:
        """Whether the variable is set and not empty."""
        return bool(self._environ.get(name))

    def text(self, name: str, *, default: str | None = None, remedy: str = "") -> str:
        """The value, or `default`. Without a default the variable has to be set."""
        value = self._environ.get(name) or default
        if value is None:
            raise ConfigurationError(
                f"{name} is missing, and other variables of {self._launcher} are set. "
                + (remedy or f"Export {name}, or start with torchrun or trainstack.launch, which set all of them.")
            )
        return value

    def number(self, name: str, *, default: int | None = None) -> int:
        """The value as an integer that is not negative."""
        text = self.text(name, default=None if default is None else str(default))
        if not text.strip().isdecimal():
            raise ConfigurationError(f"{name}={text!r} is not an integer, as {self._launcher} would have set it.")
        return int(text)

    def port(self, name: str, *, default: int | None = None) -> int:
        """The value as a port."""
        port = self.number(name, default=default)
        if not 1 <= port <= 65535:
            raise ConfigurationError(f"{name}={port}: a port is a number from 1 to 65535.")
        return port

    def rank(self, rank: str, size: str) -> tuple[int, int]:
        """The values of the variables with the names `rank` and `size`; the first is below the second."""
        place, number = self.number(rank), self.number(size)
        self.check_rank(rank, place, size, number)
        return place, number

    def check_rank(self, name: str, rank: int, limit: str, size: int) -> None:
        """Refuse a rank that is not below its world size."""
        if not 0 <= rank < size:
            raise ConfigurationError(
                f"{name} is {rank} and {limit} is {size}: the first has to be below the second. "
                f"Variables of two launchers may be mixed; trainstack uses those of {self._launcher}."
            )

    def check_same(self, name: str, value: int, other: str) -> None:
        """Refuse a variable `name` that is set to another number than `other`."""
        said = self.number(name, default=value)
        if said != value:
            raise ConfigurationError(
                f"{name}={said} and {other}={value} contradict. Unset {name}: {self._launcher} sets {other}."
            )

    def is_loopback(self, name: str) -> bool:
        """Whether the host in this variable is the loopback device."""
        host = self._environ.get(name, "")
        return host in ("localhost", "::1") or host.startswith("127.")
