"""Output of commands: JSON, tables, lines and errors, and the options `--quiet`, `--verbose` and `--color`.

No command writes to a stream in another way.

All text is escaped (`trainstack/_terminal.py`): names, metrics and messages may come from files of others.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import datetime, timezone
from typing import Any, NamedTuple, TextIO

from trainstack._terminal import escape
from trainstack.errors import ConfigurationError

FAILED = 1
"""The exit code of damage, a difference, or a training that failed."""

TROUBLE = 2
"""The exit code of a command that failed."""

JSON_FORMAT = 1
"""Rises when a key of the JSON output is removed or means something else."""


def print_json(value: Mapping[str, Any]) -> None:
    """Print an object as strict JSON in ASCII, with its `"format"`; inf and nan are the texts "inf", "-inf", "nan"."""
    stream = _json_output or sys.stdout
    stream.write(_as_json({"format": JSON_FORMAT, **value}, indent=1) + "\n")
    stream.flush()


_json_output: TextIO | None = None  # in a block of `only_json`


@contextmanager
def only_json() -> Iterator[None]:
    """A block in which all output but that of `print_json` goes to standard error, also that of other processes."""
    global _json_output
    with ExitStack() as stack:
        stream = sys.stdout
        if sys.stderr and (sys.stdout, sys.stderr) == (sys.__stdout__, sys.__stderr__):
            stream = stack.enter_context(open(os.dup(1), "w", encoding="ascii"))
            stack.callback(os.dup2, stream.fileno(), 1)
            stack.callback(sys.stdout.flush)  # code may have kept this stream; its text goes to standard error too
            os.dup2(2, 1)
        stack.enter_context(redirect_stdout(sys.stderr))
        _json_output = stream
        try:
            yield
        finally:
            _json_output = None


def _as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(to_plain(value), indent=indent, allow_nan=False).replace("\x7f", "\\u007f")


def print_line(text: str = "") -> None:
    """Print one line."""
    sys.stdout.write(escape(text) + "\n")


def flush() -> None:
    """Flush the output, for a command that continues."""
    sys.stdout.flush()


def print_lines(text: str) -> None:
    """Print a text of several lines."""
    for line in text.split("\n"):
        print_line(line)


def print_at_once(text: str) -> None:
    """Print a text of several lines, and flush the output: the next one may come hours later."""
    print_lines(text)
    flush()


def print_error(message: str, error: BaseException | None = None, as_json: bool = False, **facts: Any) -> None:
    """Print an error on standard error, in one line; as JSON with the class of the error and further facts."""
    text = escape(" ".join(message.split()))
    if as_json:
        text = _as_json({"format": JSON_FORMAT, "error": text, "class": type(error).__name__, **facts})
        _write_error(f"{text}\n")
    else:
        _write_error(f"trainstack: {text}\n")


def print_traceback(error: BaseException, hint: str = "", as_json: bool = False) -> None:
    """Print the traceback of `error`, and then a hint, on standard error; as JSON one object with its lines."""
    lines = [escape(line) for line in "".join(traceback.format_exception(error)).splitlines()]
    if as_json:
        print_error(f"{type(error).__name__}: {error}{hint and f' ({hint})'}", error, as_json, traceback=lines)
        return
    _write_error("".join(f"{line}\n" for line in lines))
    if hint:
        print_error(hint)


def _write_error(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # it is closed
        pass


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, spare: Sequence[str] = ()) -> None:
    """Print rows under their columns; the head is bold if the output has colors.

    They are off if NO_COLOR is set, on if FORCE_COLOR is, and else on in a terminal, unless TERM says "dumb".

    No cell is shortened. In a terminal that is too narrow, columns are left out and named below.

    Args:
        spare: the columns that may be left out, the first of them first.
    """
    rows = [[escape(cell) for cell in row] for row in rows]
    left_out: list[str] = []
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns
        for name in spare:
            if _width(columns, rows, left_out) <= room:
                break
            left_out.append(name)
    kept = [index for index, name in enumerate(columns) if name not in left_out]
    table = [[row[index] for index in kept] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for number, row in enumerate(table):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        sys.stdout.write(f"\x1b[1m{line}\x1b[0m\n" if number == 0 and _has_colors() else f"{line}\n")
    if left_out:
        print_line(f"left out: {', '.join(left_out)}; --wide for all columns")


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]], left_out: Sequence[str]) -> int:
    """Of the table; the last column may be wrapped, so a sentence in it does not count."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    widths[-1] = min(widths[-1], max(len(columns[-1]), 12))
    kept = [width for name, width in zip(columns, widths, strict=True) if name not in left_out]
    return sum(kept) + 2 * (len(kept) - 1)


def _has_colors() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and not dumb)


def readable_size(count: int) -> str:
    """`1_234_567` bytes -> `1.2 MB`."""
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def readable_date(text: str) -> str | None:
    """A time of a manifest in UTC to the second; None if it is none."""
    try:
        return datetime.fromisoformat(text).astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, TypeError, OverflowError):
        return None


def to_plain(value: Any) -> Any:
    """`value` as strict JSON has it: keys are text, inf and nan are text, and other objects are their text."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def suggest_options(words: Iterable[str], parser: argparse.ArgumentParser, other_names: Mapping[str, str] = {}) -> str:
    """The options of `parser` that come close to those among `words`, as the end of a message; "" if none does.

    Of a name with dots the last part will do: `--keep_last` means `--checkpointer_args.keep_last`.

    Args:
        words: the unknown words.
        parser: the parser of the command.
        other_names: names in other libraries, and what to write instead of each.
    """
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    names = {option.rpartition(".")[2].lstrip("-"): option for option in reversed(options)}
    names |= {option.lstrip("-"): option for option in options}
    close, written = list[str](), list[str]()
    for word in words:
        name = word.partition("=")[0].lstrip("-")[:80]
        if not word.startswith("--"):
            continue
        instead = name if name in names else other_names.get(name.replace("-", "_"), name)
        if instead != name and instead not in names:
            written.append(f"For --{name} write {instead}")
        else:
            close += [names[match] for match in difflib.get_close_matches(instead, names, n=1)]
    did_you_mean = [f"Did you mean {' and '.join(dict.fromkeys(close))}?"] if close else []
    return "".join(f". {sentence}" for sentence in (*written, *did_you_mean))


# --- options of the output, before or after the name of each command

_COLORS: Mapping[str, Mapping[str, str | None]] = {
    "auto": {},
    "always": {"NO_COLOR": None, "FORCE_COLOR": "1"},
    "never": {"NO_COLOR": "1", "FORCE_COLOR": None},
}
"""The variables of each value of `--color`, which rich, Python and child processes read; None removes one."""
_FLAG = re.compile("-([qv]+)|--(quiet|verbose)")


class OutputOptions(NamedTuple):
    """The given options of the output.

    Attributes:
        quiet: print nothing on standard output.
        verbose: print the messages of the library, and tracebacks of errors inside of commands.
        color: a key of `_COLORS`.
        as_json: print one JSON object, also for an error.
    """

    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    as_json: bool = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A block with this output. Streams, variables and loggers are restored."""
        changes = {**_COLORS[self.color], **({"TRAINSTACK_TRACEBACK": "1"} if self.verbose else {})}
        with ExitStack() as stack:
            stack.enter_context(_environment(changes))
            if self.quiet:
                nothing = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect_stdout(nothing))
            if self.verbose:
                stack.enter_context(_messages())
            yield


def take_output_options(words: Sequence[str]) -> tuple[list[str], OutputOptions]:
    """The words without these options, and the options. Words after `--` belong to a script.

    Raises:
        ConfigurationError: the value of `--color` is unknown, or both `-q` and `-v` are given.
    """
    at = words.index("--") if "--" in words else len(words)
    left, given, color = list[str](), set[str](), "auto"
    own = iter(words[:at])
    for word in own:
        name, equals, value = word.partition("=")
        if flag := _FLAG.fullmatch(word):
            given |= set(flag[1] or flag[2][0])
        elif name == "--color":
            color = value if equals else next(own, "")
            if color not in _COLORS:
                raise ConfigurationError(f"{f'--color {color}'.rstrip()}: write {', '.join(_COLORS)}.")
        else:
            left.append(word)
    if len(given) > 1:
        raise ConfigurationError("-q prints nothing, and -v prints more. Remove one of them.")
    return [*left, *words[at:]], OutputOptions("q" in given, "v" in given, color, "--json" in left)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the help and the completion of `parser`; `take_output_options` has read them before."""
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but warnings and errors")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print the messages of the library, and tracebacks of errors"
    )
    parser.add_argument("--color", metavar="WHEN", help=f"{', '.join(_COLORS)} (default: auto)")


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    _set_variables(changes)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _messages() -> Iterator[None]:
    """A block in which the messages of the library go to standard error."""
    import logging  # the other commands start without it

    logger, handler = logging.getLogger("trainstack"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
