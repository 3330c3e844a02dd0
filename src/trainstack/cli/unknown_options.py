"""Which option was meant by one that there is not."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable


def meant(words: Iterable[str], parser: argparse.ArgumentParser) -> str:
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
