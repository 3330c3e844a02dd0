"""`make test-long` runs each battery once, and continues where an interrupted run ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import long_tests
from tools.long_tests import Battery, main

pytestmark = pytest.mark.processes


def batteries(folder: Path) -> list[Battery]:
    """Each appends a letter to a file; `b` fails until the file `mended` exists."""
    write = f"open({str(folder / 'ran')!r}, 'a').write"
    fails = f"import os, sys; {write}('b'); sys.exit(not os.path.exists({str(folder / 'mended')!r}))"
    return [Battery("a", ("-c", f"{write}('a')")), Battery("b", ("-c", fails)), Battery("c", ("-c", f"{write}('c')"))]


def test_a_battery_that_has_passed_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = batteries(tmp_path)
    assert main(["a"], tmp_path, known) == 0
    assert main([], tmp_path, known) == 1
    assert "FAILED with exit status 1" in capsys.readouterr().out
    assert (tmp_path / "ran").read_text() == "abc"
    (tmp_path / "mended").touch()

    assert main([], tmp_path, known) == 0
    assert (tmp_path / "ran").read_text() == "abcb"
    assert main(["--restart"], tmp_path, known) == 0
    assert (tmp_path / "ran").read_text() == "abcbabc"


def test_results_of_another_commit_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = batteries(tmp_path)[:1]
    for commit in ("one", "one", "two"):
        monkeypatch.setattr(long_tests, "commit_of", lambda root, commit=commit: commit)
        main([], tmp_path, known)

    assert (tmp_path / "ran").read_text() == "aa"


def test_an_interrupted_run_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = batteries(tmp_path)
    run = long_tests.run

    def interrupted(battery: Battery, log: Path) -> int:
        if battery.name == "b":
            raise KeyboardInterrupt
        return run(battery, log)

    monkeypatch.setattr(long_tests, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([], tmp_path, known)
    monkeypatch.setattr(long_tests, "run", run)
    main(["b", "c"], tmp_path, known)

    assert (tmp_path / "ran").read_text() == "abc"


def test_every_battery_has_a_different_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = [battery.name for battery in long_tests.batteries()]

    assert len(set(names)) == len(names)
    assert main(["--list"], tmp_path) == 0
    assert capsys.readouterr().out.count("not run") == len(names)
    with pytest.raises(SystemExit):
        main(["no such battery"], tmp_path)
