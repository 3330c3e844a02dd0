"""The runner of `make clients`, with scripts of this test. The real clients are not a part of the tests."""

from __future__ import annotations

import functools
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

# The import of torchvision without its compiled operators.
TORCHVISION = {
    "__init__": "from . import extension, _meta_registrations",
    "extension": "def _has_ops(): return False\ndef _assert_has_ops(): raise RuntimeError",
    "_meta_registrations": "import torch\ntorch.library.register_fake('torchvision::nms')(lambda *given: given[1])\n"
    "torch.library.register_fake('torchvision::qnms')(lambda *given: given[1])",
}
DETECTION = """
import torch, torchvision
torchvision.extension._assert_has_ops()
boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [2, 0, 6, 4], [0, 1, 4, 6]])  # 0 overlaps by 0.8, 0.33 and 0.5
scores = torch.tensor([0.9, 0.8, 0.7, 0.6])
for threshold, kept in {0.3: [0], 0.4: [0, 2], 0.6: [0, 2, 3], 0.9: [0, 1, 2, 3]}.items():
    assert torch.ops.torchvision.nms(boxes, scores, threshold).tolist() == kept, threshold
order = torch.tensor([3, 1, 0, 2])
assert torch.ops.torchvision.nms(boxes[order], scores[order], 0.4).tolist() == [2, 3]
assert torch.ops.torchvision.nms(boxes[:0], scores[:0], 0.4).tolist() == []
"""


@pytest.fixture
def area(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of scripts instead of the real ones."""
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
    assert "remove the mark" in printed
    assert "5 scripts: " in printed

    # Failed and changed scripts are run again, the others are not.
    (area / "fails.py").write_text("", encoding="utf-8")
    (area / "passes.py").write_text("raise SystemExit('changed')", encoding="utf-8")
    assert run(monkeypatch, "--only", "fails", "passes", "marked") == 1
    printed = capsys.readouterr().out
    assert "changed" in printed
    assert "area/marked" not in printed.partition("| script |")[0]
    assert "3 scripts: 1 expected to fail, 1 passed, 1 FAILED" in printed or "1 passed" in printed


@pytest.mark.processes
def test_nms_is_added_if_torchvision_does_not_load(
    area: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = area.parents[2] / "packages"
    for name, source in {f"torchvision/{name}.py": source for name, source in TORCHVISION.items()}.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(source, encoding="utf-8")
    (packages / "torchvision-0.1.dist-info").mkdir()
    (packages / "torchvision-0.1.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.1\n")
    (area / "detects.py").write_text(f"import sys\nsys.path.insert(0, {str(packages)!r})\n{DETECTION}")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    probe = clients.added_operators.__wrapped__
    monkeypatch.setattr(clients, "added_operators", functools.cache(probe))
    assert run(monkeypatch, "--only", "detects") == 0, capsys.readouterr().out
    assert "\ntorchvision 0.1 with torch 2." in capsys.readouterr().out

    (packages / "torchvision" / "_meta_registrations.py").write_text("", encoding="utf-8")
    assert probe(sys.executable) == ""


def test_each_script_names_its_client_and_has_an_assertion() -> None:
    scripts = clients.scripts()
    assert len(scripts) >= 60
    for script in scripts:
        assert clients.package_of(script) is not None, script
        assert re.search(r"\bassert(_close)?\b", script.read_text(encoding="utf-8")), script
        assert clients.PINS[clients.ENVIRONMENTS.get(script.parent.name, "main")].exists()


def test_the_page_names_each_script_with_its_result() -> None:
    page = (Path(__file__).parents[2] / "docs" / "comparison.md").read_text(encoding="utf-8")
    by_name = {clients.name_of(script): script for script in clients.scripts()}
    named = {}
    for line in page.splitlines():
        for name in re.findall(r"`([a-z]+/[a-z0-9_]+)`", line):
            named[name] = "not yet" if "| not yet" in line else "works"
    assert sorted(named) == sorted(by_name)
    assert f"run of the {len(by_name)} scripts" in page
    marked = {name: clients.expected_failure(script) is not None for name, script in by_name.items()}
    assert {name for name, result in named.items() if result == "not yet"} == {name for name in marked if marked[name]}
