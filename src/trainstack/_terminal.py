"""`escape`, which makes text safe to print on a terminal, and a filter that applies it to every log message.

Names of files, metrics and messages may come from files of other users, and could contain control sequences.
"""

from __future__ import annotations

import logging
import re

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL, C1
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff"  # direction, line separators, zero-width
    "\ud800-\udfff\U000e0000-\U000e007f]"  # surrogates, tags
)


def escape(text: str) -> str:
    """`text` in one line, with escapes for control characters and for characters that hide or reorder text."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class EscapeFilter(logging.Filter):
    """Escapes the message of each record, except for line breaks."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not text.isprintable():
            record.msg, record.args = "\n".join(map(escape, text.split("\n"))), None
        return True
