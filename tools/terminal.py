"""Run a command in a pseudo-terminal and keep its final screen with the colours."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|([\r\n\b])")


class Screen:
    """A terminal of unlimited height: rows of cells, each a character and the codes of its style.

    It handles the output of rich, tqdm and Python: line ends, backspaces, cursor up (A), columns (G), erasing (J, K),
    styles (m). It ignores other sequences.

    Args:
        width: columns; longer lines wrap.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._rows: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def feed(self, text: str) -> None:
        """Process the output of a program."""
        end = 0
        for found in _CONTROL.finditer(text):
            self._put(text[end : found.start()])
            end = found.end()
            if found[3]:
                self._move(found[3])
            elif found[2]:
                self._carry_out(found[2], found[1])
        self._put(text[end:])

    @property
    def lines(self) -> list[str]:
        """The rows as plain text, without trailing spaces and trailing empty rows."""
        lines = ["".join(character for character, _ in row).rstrip() for row in self._rows]
        return "\n".join(lines).rstrip("\n").split("\n")

    def ansi(self) -> str:
        """The rows as text with styles, for `rich.text.Text.from_ansi`."""
        rows = []
        for row in self._rows[: len(self.lines)]:
            rows.append("".join(f"\x1b[0m\x1b[{style}m{character}" if style else character for character, style in row))
        return "\x1b[0m\n".join(rows)

    def _put(self, text: str) -> None:
        for character in text:
            if self._column >= self.width:
                self._row, self._column = self._row + 1, 0
            self._reach()
            row = self._rows[self._row]
            row += [(" ", "")] * (self._column + 1 - len(row))
            row[self._column] = (character, self._style)
            self._column += 1

    def _reach(self) -> None:
        self._rows += [[] for _ in range(self._row + 1 - len(self._rows))]

    def _move(self, control: str) -> None:
        if control == "\n":
            self._row += 1
            self._reach()
        elif control == "\r":
            self._column = 0
        else:
            self._column = max(0, self._column - 1)

    def _carry_out(self, command: str, numbers: str) -> None:
        first = int(numbers) if numbers.isdigit() else 0
        if command == "A":
            self._row = max(0, self._row - max(1, first))
        elif command == "G":
            self._column = max(0, first - 1)
        elif command == "K":
            self._rows[self._row] = [] if first == 2 else self._rows[self._row][: self._column]
        elif command == "J":
            del self._rows[self._row + 1 :]
            self._rows[self._row] = self._rows[self._row][: self._column]
        elif command == "m":
            self._style = "" if numbers in ("", "0") else ";".join(filter(None, [self._style, numbers]))


def run_in_terminal(
    command: Sequence[str],
    folder: Path,
    screen: Screen,
    *,
    timeout_s: float = 120.0,
) -> int:
    """Run `command` in `folder`, with a terminal of `screen.width` columns as all of its streams.

    Args:
        command: the program and its arguments.
        folder: its working directory.
        screen: gets the output.
        timeout_s: wall-clock seconds after which the process is killed.

    Returns:
        The exit status, negative after a signal.

    Raises:
        TimeoutError: it was killed because of `timeout_s`.
    """
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, screen.width, 0, 0))
    left_out = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | {"TERM": "xterm"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    deadline, pending = time.monotonic() + timeout_s, b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            pending += os.read(ours, 1 << 16)
            text, pending = _decoded(pending)
            screen.feed(text)
    late = process.poll() is None and time.monotonic() >= deadline
    if late:
        process.kill()
    status = process.wait()
    os.close(ours)
    if late:
        raise TimeoutError(f"{command} took longer than {timeout_s:g} s. It showed:\n" + "\n".join(screen.lines))
    return status


def _decoded(data: bytes) -> tuple[str, bytes]:
    """The whole characters and escape sequences at the beginning of `data`, and the rest."""
    escape = data.rfind(b"\x1b")
    cut = escape if escape >= 0 and not _CONTROL.match(data[escape:].decode("utf-8", "ignore")) else len(data)
    for end in range(cut, max(cut - 4, -1), -1):
        with contextlib.suppress(UnicodeDecodeError):
            return data[:end].decode("utf-8"), data[end:]
    return data[:cut].decode("utf-8", "replace"), data[cut:]
