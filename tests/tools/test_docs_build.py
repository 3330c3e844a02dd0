"""`make docs` fails on a fault in a page: its command builds a small site with the settings of mkdocs.yml."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patience

pytest.importorskip("mkdocs", reason="needs the extra docs")
pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]

MODULE = '''"""A module with one function."""


def double(number: int) -> int:
    """Twice `number`.

    Args:
        number: any.
    """
    return 2 * number
'''
FAULTS = {
    "a link to a page that does not exist": ("[x](no-page.md)", "'no-page.md'"),
    "an anchor that another page lacks": ("[x](page.md#no-anchor-there)", "'page.md#no-anchor-there'"),
    "an anchor that the page itself lacks": ("[x](#no-anchor-here)", "'#no-anchor-here'"),
    "an absolute link": ("[x](/page.md)", "'/page.md'"),
    "a link to a folder": ("[x](folder/)", "'folder/'"),
}


def build(folder: Path, *, home: str = "", module: str = MODULE, pages: tuple[str, ...] = ()) -> tuple[int, str]:
    """Build a site of two pages by the command of the Makefile; returns its exit status and its output."""
    docs = folder / "docs"
    docs.mkdir(parents=True)
    (folder / "src").mkdir()
    (folder / "src" / "doubling.py").write_text(module, encoding="utf-8")
    (docs / "index.md").write_text(f"# Home\n\n[there](page.md#the-part)\n\n{home}\n", encoding="utf-8")
    (docs / "page.md").write_text("# Page\n\n## The part\n\n::: doubling\n", encoding="utf-8")
    for name in pages:
        (docs / name).write_text("# Another\n", encoding="utf-8")
    config = f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav:\n  - index.md\n  - page.md\n"
    (folder / "tools").symlink_to(ROOT / "tools")  # the theme's overrides
    (folder / "mkdocs.yml").write_text(config, encoding="utf-8")
    found = re.search(r"^\t\$\(BIN\)/mkdocs (build .*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert found is not None, "make docs has another command: change this test"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *shlex.split(found[1])],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(60),
    )
    return done.returncode, done.stdout + done.stderr


def warnings_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("WARNING")]


def test_a_site_without_faults_is_built(tmp_path: Path) -> None:
    status, output = build(tmp_path)
    assert (status, warnings_in(output)) == (0, []), output


def test_one_dead_anchor_fails_the_build(tmp_path: Path) -> None:
    status, output = build(tmp_path, home=FAULTS["an anchor that another page lacks"][0])
    assert (status, len(warnings_in(output))) == (1, 1), output


def test_each_fault_is_a_warning_and_fails_the_build(tmp_path: Path) -> None:
    """One build for all, since each takes seconds; `--strict` fails on a single warning, as the test above shows."""
    status, output = build(
        tmp_path,
        home="\n\n".join(text for text, _ in FAULTS.values()),
        module=MODULE.replace("number: any.", "number: any.\n        other: there is no such parameter."),
        pages=("outside.md",),
    )
    shown = {fault: quoted for fault, (_, quoted) in FAULTS.items()}
    shown["a page outside the navigation"] = 'not included in the "nav"'
    shown["a docstring entry without a parameter"] = "'other'"
    missed = [fault for fault, quoted in shown.items() if not any(quoted in line for line in warnings_in(output))]
    assert not missed, output
    assert status == 1
    assert len(warnings_in(output)) >= len(shown)
