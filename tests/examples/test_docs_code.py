"""The Python in README.md and docs/ runs as it stands, and prints what the pages say.

The blocks of one page run in their order, in one fresh process, in an empty directory. `<!-- no-run -->` in the line
above a block leaves it out; `<!-- output -->` above a text block says that this is what the Python block before it
prints (`...` stands for anything).
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:^<!-- (?P<mark>[a-z-]+) -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$", re.M | re.S)
SEPARATOR = "=== the next block ==="
ANYTHING = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    line: int
    source: str
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks: list[Block] = []
    for found in FENCE.finditer(text):
        mark, language, body = found["mark"], found["language"], found["body"]
        if language == "python" and mark != "no-run":
            blocks.append(Block(text.count("\n", 0, found.start("body")), body, None))
        elif mark == "output":
            blocks[-1] = blocks[-1]._replace(output=body)
    return blocks


def script_of(blocks: list[Block]) -> str:
    """One script; each block keeps the line numbers that it has on its page, so that a traceback points there."""
    lines = ["import sys"]
    for block in blocks:
        source = "\n" * block.line + block.source
        lines.append(f"exec(compile({source!r}, 'page', 'exec'), globals())")
        # Not in processes that the page starts, which import it anew.
        lines.append(f"print({SEPARATOR!r}, flush=True) if __name__ == '__main__' else None")
    return "\n".join(lines)


def run(blocks: list[Block], directory: Path) -> list[str]:
    script = directory / "page.py"
    script.write_text(script_of(blocks), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "TMPDIR": str(directory)}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(SEPARATOR + "\n")


def test_the_pages_that_must_have_code_have_it() -> None:
    with_code = {page.name for page in PAGES if blocks_of(page)}
    assert {"README.md", "quickstart.md"} <= with_code


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    printed = run(blocks, tmp_path)
    checker = doctest.OutputChecker()
    wrong = [
        f"{page.name}, block at line {block.line} printed:\n{got}\nbut the page says:\n{block.output}"
        for block, got in zip(blocks, printed, strict=False)
        if block.output is not None and not checker.check_output(block.output, got, ANYTHING)
    ]
    assert not wrong, "\n".join(wrong)
