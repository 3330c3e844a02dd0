"""Find and run the Python blocks of the pages.

The blocks of one page run in their order, in one process, which is a fork of a process that has imported trainstack.
`<!-- no-run -->` above a block omits it. `<!-- output -->` above a text block marks it as the output of the Python
block before it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TIMEOUT_S = 120

_FENCE = re.compile(r"(?:^<!-- (?P<mark>[a-z-]+) -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$", re.M | re.S)
_SEPARATOR = "=== the next block ==="


class Block(NamedTuple):
    """One block of Python.

    Attributes:
        line: of the page, at which it begins.
        source: the Python.
        output: the output on the page; None without one.
    """

    line: int
    source: str
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page without those marked `no-run`."""
    text = page.read_text(encoding="utf-8")
    blocks: list[Block] = []
    for found in _FENCE.finditer(text):
        mark, language, body = found["mark"], found["language"], found["body"]
        if language == "python" and mark != "no-run":
            blocks.append(Block(text.count("\n", 0, found.start("body")), body, None))
        elif mark == "output":
            blocks[-1] = blocks[-1]._replace(output=body)
    return blocks


class Runner:
    """A context that runs pages. Each page gets a process and an empty folder; warnings are errors.

    Args:
        python: the interpreter.
    """

    def __init__(self, python: str = sys.executable) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([python, ROOT / "tools" / "forks.py"], text=True, env=environment, **pipes)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()  # the end of its input

    def run(self, blocks: list[Block], folder: Path) -> list[str]:
        """The output of each block.

        Raises:
            AssertionError: the page failed. The message has the output and a traceback with line numbers of the page.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        script = folder / "page.py"
        script.write_text(_script_of(blocks), encoding="utf-8")
        job = {"script": str(script), "folder": str(folder), "timeout_s": TIMEOUT_S}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        status = self._process.stdout.readline().strip()
        printed = (folder / "stdout.txt").read_text(encoding="utf-8")
        if status != "0":
            raise AssertionError(f"exit status {status}\n{printed}\n{(folder / 'stderr.txt').read_text('utf-8')}")
        return printed.split(_SEPARATOR + "\n")


def _script_of(blocks: list[Block]) -> str:
    """One script. Each block keeps its line numbers of the page, so that a traceback points there."""
    lines = ["import sys"]
    for block in blocks:
        source = "\n" * block.line + block.source
        lines.append(f"exec(compile({source!r}, 'page', 'exec'), globals())")
        # Processes that the page starts import the script again, and must not print the separator.
        lines.append(f"print({_SEPARATOR!r}, flush=True) if __name__ == '__main__' else None")
    return "\n".join(lines)
