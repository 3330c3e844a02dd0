"""Output of commands as JSON, tables or plain text."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """Print `value` as strict JSON: what JSON lacks is printed as text."""
    sys.stdout.write(json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def print_line(text: str = "") -> None:
    """Print one line."""
    sys.stdout.write(text + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their columns; with colours in a terminal, unless NO_COLOR is set or TERM says "dumb"."""
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    if sys.stdout.isatty() and not dumb and not os.environ.get("NO_COLOR"):
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print_line(line.rstrip())


def readable_size(count: int) -> str:
    """`1_234_567` bytes -> `1.2 MB`."""
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def suggest_options(words: Iterable[str], parser: argparse.ArgumentParser) -> str:
    """The options of `parser` that come close to those among `words`, as the end of a message; "" if none does.

    Of a name with dots the last part will do: `--keep_last` means `--checkpointer_args.keep_last`.
    """
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    names = {option.rpartition(".")[2].lstrip("-"): option for option in reversed(options)}
    names |= {option.lstrip("-"): option for option in options}
    close = [
        names[match]
        for word in words
        if word.startswith("--")
        for match in difflib.get_close_matches(word.partition("=")[0].lstrip("-"), names, n=1)
    ]
    return f". Did you mean {' and '.join(dict.fromkeys(close))}?" if close else ""
