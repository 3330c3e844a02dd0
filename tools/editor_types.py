"""Types as editors show them: errors of pyright in three pages and the examples, and the typed share of the library.

python -m tools.editor_types            prints the errors of pyright; the exit status is 1 if anything is wrong
python -m tools.editor_types --symbols  also the public names whose type is not known
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from tools.pages import blocks_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/quickstart.md", "docs/supervised.md")
LEAST_COMPLETENESS = 0.96
"""The share of public names whose type is known without inference, so that all checkers agree on it."""


def pyright(*arguments: str) -> dict[str, Any]:
    """The output of `pyright --outputjson`.

    Raises:
        RuntimeError: pyright did not print JSON.
    """
    # verifytypes searches packages next to the verified one, so PYTHONPATH has their folder, too.
    paths = [str(ROOT / "src"), sysconfig.get_paths()["purelib"]]
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(ended.stdout[ended.stdout.index("{") :])
    except ValueError:
        raise RuntimeError(f"pyright did not run: {ended.stdout}{ended.stderr}") from None
    return found


def source_of(page: Path) -> str:
    """The Python of a page; each line has the same number as on the page."""
    source = ""
    for block in blocks_of(page):
        source += "\n" * (block.line - source.count("\n")) + block.source
    return source


def errors_of_scripts(pages: list[Path], examples: list[Path]) -> list[str]:
    """The errors in the pages' Python, with the line numbers of the pages, and in the examples."""
    with tempfile.TemporaryDirectory() as folder:
        for page in pages:
            (Path(folder) / f"{page.stem}_page.py").write_text(source_of(page), encoding="utf-8")
        for example in examples:
            shutil.copy(example, folder)
        (Path(folder) / "pyrightconfig.json").write_text(
            "{}", encoding="utf-8"
        )  # otherwise pyright reads that of a parent folder
        found = pyright("--project", folder)["generalDiagnostics"]
    return [
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in found
        if one["severity"] == "error"
    ]


def completeness() -> tuple[float, list[str]]:
    """The share of the public names with a known type, and the names without one."""
    report = pyright("--verifytypes", "trainstack", "--ignoreexternal")["typeCompleteness"]
    others = [one["name"] for one in report["symbols"] if one["isExported"] and not one["isTypeKnown"]]
    return report["completenessScore"], others


def main() -> int:
    """Print the errors; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--symbols", action="store_true", help="print the names whose type is not known")
    options = parser.parse_args()
    if importlib.util.find_spec("pyright") is None:
        print("pyright is not installed: pip install 'pyright[nodejs]'")
        return 1
    examples = sorted((ROOT / "examples").glob("*.py"))
    errors = errors_of_scripts([ROOT / page for page in PAGES], examples)
    score, others = completeness()
    print(*errors, *(others if options.symbols else ()), sep="\n", end="\n" if errors or options.symbols else "")
    where = f"{len(PAGES)} pages and {len(examples)} examples"
    print(f"pyright: {len(errors)} errors in {where}; {score:.1%} of the public names have a known type")
    if score < LEAST_COMPLETENESS:
        print(f"At least {LEAST_COMPLETENESS:.0%} have to be. Annotate those that --symbols prints.")
    return int(bool(errors) or score < LEAST_COMPLETENESS)


if __name__ == "__main__":
    sys.exit(main())
