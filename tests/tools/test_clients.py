"""`make clients`: the runner, on scripts that are made here; the clients themselves are no part of the tests."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tools.clients import __main__ as clients

SCRIPTS = {
    "passes": "import json\nassert json\n",
    "fails": "raise SystemExit('it is broken')\n",
    "waits": "import time\ntime.sleep(60)\n",
    "marked": f"{clients.MARK}not there yet\nraise SystemExit(1)\n",
    "mended": f"{clients.MARK}not there yet\n",
}


@pytest.fixture
def area(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of scripts in the place of the real ones."""
    folder = tmp_path / "tools" / "clients" / "area"
    folder.mkdir(parents=True)
    for name, source in SCRIPTS.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    (folder.parent / "main.txt").write_text("", encoding="utf-8")
    for name, value in {"ROOT": tmp_path, "SCRIPTS": folder.parent, "WORK": tmp_path / "build"}.items():
        monkeypatch.setattr(clients, name, value)
    monkeypatch.setitem(clients.PINS, "main", folder.parent / "main.txt")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["clients", "--python", f"main={sys.executable}", *arguments])
    return clients.main()


@pytest.mark.processes
def test_each_script_is_run_once_and_judged_by_its_mark(
    area: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--limit", "3") == 1
    printed = capsys.readouterr().out
    found = {row["name"]: row for row in json.loads((clients.WORK / "results.json").read_text()).values()}
    assert {name.partition("/")[2]: row["result"] for name, row in found.items()} == {
        "passes": "passed",
        "fails": "FAILED",
        "waits": "FAILED",
        "marked": "expected to fail",
        "mended": "FAILED",
    }
    assert "it is broken" in printed
    assert "took more than 3 s" in printed
    assert "take the mark away" in printed
    assert "5 scripts: " in printed

    # Those that failed are run again, and one that has changed; the others are not.
    (area / "fails.py").write_text("", encoding="utf-8")
    (area / "passes.py").write_text("raise SystemExit('changed')", encoding="utf-8")
    assert run(monkeypatch, "--only", "fails", "passes", "marked") == 1
    printed = capsys.readouterr().out
    assert "changed" in printed
    assert "area/marked" not in printed.partition("| script |")[0]
    assert "3 scripts: 1 expected to fail, 1 passed, 1 FAILED" in printed or "1 passed" in printed


def test_each_script_names_its_client_and_has_an_assertion() -> None:
    scripts = clients.scripts()
    assert len(scripts) >= 60
    for script in scripts:
        assert clients.package_of(script) is not None, script
        assert re.search(r"\bassert(_close)?\b", script.read_text(encoding="utf-8")), script
        assert clients.PINS[clients.ENVIRONMENTS.get(script.parent.name, "main")].exists()


def test_the_page_names_each_script_with_its_result() -> None:
    page = (Path(__file__).parents[2] / "docs" / "comparison.md").read_text(encoding="utf-8")
    by_name = {clients.name_of(script): script for script in clients.scripts() if script.parent.name != "trackers"}
    named = {}
    for line in page.splitlines():
        for name in re.findall(r"`([a-z]+/[a-z0-9_]+)`", line):
            named[name] = "not yet" if "| not yet" in line else "works"
    assert sorted(named) == sorted(by_name)
    marked = {name: clients.expected_failure(script) is not None for name, script in by_name.items()}
    assert {name for name, result in named.items() if result == "not yet"} == {name for name in marked if marked[name]}
