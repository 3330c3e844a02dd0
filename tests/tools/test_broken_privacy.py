"""The table of the faults that the privacy audit finds."""

from __future__ import annotations

import pytest

from tools import broken_privacy
from tools.bench.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unprobed")]


def test_the_table_shows_found_faults_and_false_alarms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken_privacy, "BROKEN", {"no noise": broken_privacy.BROKEN["no noise"]})
    assert main(["audit", "--runs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["noise", "account", "sampling", "canaries"]
    assert lines[1].split()[:6] == ["no", "noise", "BROKEN", "-", "-", "BROKEN"]
    assert lines[2].split()[:7] == ["correct,", "audit", "1", "-", "-", "-", "-"]
    assert lines[3] == "1 of 1 broken ones caught; 0 of 1 correct ones blamed"


def test_a_fault_that_escapes_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken_privacy, "BROKEN", {"harmless": (broken_privacy._scaled_noise(lambda _: 1.0), set())})
    assert main(["audit", "--runs", "0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 of 1 broken ones caught; 0 of 0 correct ones blamed"
