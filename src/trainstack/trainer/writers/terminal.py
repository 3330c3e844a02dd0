"""A text stream that falls silent when the terminal behind it is gone."""

from __future__ import annotations

from typing import TextIO


class QuietStream:
    """Wraps a text stream so that writing never raises: a run must outlive the terminal it was started from.

    `gone` becomes true at the first failure (a broken pipe, a closed stream, a full disk), and nothing is
    written from then on. Characters that the stream's encoding lacks are written as escapes. The stream is
    borrowed: it is never closed here.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.gone = stream is None

    @property
    def encoding(self) -> str:
        """The encoding of the stream beneath."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether a terminal that is still there lies beneath."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """The descriptor beneath. Raises OSError where there is none."""
        if self._stream is None:
            raise OSError("there is no stream beneath")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write `text`, or nothing if the stream is gone; returns the length of `text`."""
        if self._stream is not None and not self.gone:
            try:
                self._write(self._stream, text)
            except (OSError, ValueError):
                self.gone = True
        return len(text)

    def flush(self) -> None:
        """Flush the stream if it is still there."""
        if self._stream is not None and not self.gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self.gone = True

    def line(self, text: str) -> None:
        """Write `text` as one line and flush."""
        self.write(text + "\n")
        self.flush()

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
