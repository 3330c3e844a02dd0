"""Run scripts for PyMarlin with `trainstack.compat.pymarlin`, and count the changed lines.

`python tools/pymarlin_scripts.py` runs those of tests/compat/pymarlin_scripts and prints a table. A rule changes import
lines, and `EDITS` changes other lines. A script gets a folder with its `CONFIG` as config.yaml.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "compat" / "pymarlin_scripts"
NAMES = ("cifar", "glue", "seq_classification", "summarization", "covid", "snli")
EDITS = {"snli": {"    delta = 1.0 / len(data.get_train_dataset())": "    delta = 0.1 / len(data.get_train_dataset())"}}
"""Lines of a script that the library refuses, and their replacements."""

_IMPORT = re.compile(r"^(\s*)(from|import) pymarlin\b(?P<alias> as \w+$)?")


class Changed(NamedTuple):
    """A script with changed lines.

    Attributes:
        source: the whole script.
        lines: the number of lines.
        imports: the number of changed import lines.
        others: the number of other changed lines.
    """

    source: str
    lines: int
    imports: int
    others: int


def change(name: str, *, edits: bool = True) -> Changed:
    """The script `name` with changed import lines and, with `edits`, its `EDITS`."""
    before = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8").splitlines()
    after = [_IMPORT.sub(_import, line) for line in before]
    imports = sum(one != other for one, other in zip(before, after, strict=True))
    replaced = EDITS.get(name, {}) if edits else {}
    final = [replaced.get(line, line) for line in after]
    others = sum(one != other for one, other in zip(after, final, strict=True))
    return Changed("\n".join(final) + "\n", len(before), imports, others)


def _import(match: re.Match[str]) -> str:
    indent, word, alias = match[1], match[2], match["alias"] or ""
    if word == "import" and not alias:
        alias = " as pymarlin"
    return f"{indent}{word} trainstack.compat.pymarlin{alias}"


def run(script: Changed, folder: Path) -> dict[str, Any]:
    """Run `script` as a program in `folder`; returns its variables."""
    path = folder / "script.py"
    path.write_text(script.source, encoding="utf-8")
    config = re.search(r'^CONFIG = """(.*?)"""', script.source, re.DOTALL | re.MULTILINE)
    if config is not None:
        (folder / "config.yaml").write_text(config[1], encoding="utf-8")
    with _program(path):
        return runpy.run_path(str(path), run_name="__main__")


@contextmanager
def _program(path: Path) -> Iterator[None]:
    """A block with the arguments, the current folder and the import path of a program at `path`."""
    before, main = (os.getcwd(), sys.argv, sys.path[:]), sys.modules["__main__"]
    os.chdir(path.parent)
    sys.argv, sys.path[:0] = [str(path)], [str(SCRIPTS)]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        os.chdir(before[0])
        sys.argv, sys.path[:] = before[1], before[2]


def main() -> None:
    """Run all scripts and print the numbers of changed lines."""
    rows = []
    for name in NAMES:
        script = change(name)
        with tempfile.TemporaryDirectory() as folder:
            run(script, Path(folder))
        rows.append((name, script))
    print(f"\n{'script':<20}{'lines':>7}{'imports changed':>17}{'other lines changed':>21}")
    for name, script in rows:
        print(f"{name:<20}{script.lines:>7}{script.imports:>17}{script.others:>21}")


if __name__ == "__main__":
    main()
