"""`make mutants`: which changes it makes, and that it tells those that tests detect from those that none detects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tools.mutants import judging
from tools.mutants.__main__ import main
from tools.mutants.changes import changes_of
from tools.mutants.results import wilson

SOURCE = '''"""Two functions with 1 docstring."""


def clip(value: float, limit: float) -> float:
    """The smaller one, if it is > 0."""
    return limit if value > limit else value


def countdown(steps: int) -> int:
    while steps > 0:
        steps = steps - 1
    return steps
'''
TESTS = """
from toy.module import clip, countdown

def test_clip():
    assert (clip(3, 2), clip(1, 2)) == (2, 1)

def test_countdown():
    assert countdown(4) == 0
"""
EQUAL = (
    "src/toy/module.py | clip | return limit if value > limit else value -> return limit if value >= limit else value"
)
BY_TWO = "src/toy/module.py | countdown | steps = steps - 1 -> steps = steps - 2"
ENDLESS = "src/toy/module.py | countdown | steps = steps - 1 -> steps = (steps + 1)"


def changes(tmp_path: Path, source: str) -> list[str]:
    """The changes of a file with this source, as "kind: before -> after"."""
    (tmp_path / "module.py").write_text(source)
    return [f"{change.kind}: {change.before} -> {change.after}" for change in changes_of(tmp_path, "module.py")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", ["comparison: x = a < b -> x = a <= b"]),
        ("x = a is not None", ["comparison: x = a is not None -> x = a is None"]),
        ("x = 0.5", ["constant: x = 0.5 -> x = 1.0"]),
        ("def f(a=True): ...", ["constant: True -> False"]),
        ("if a:\n    f()", ["condition: if a: -> if (not (a)):", "statement: f() -> pass"]),
        ("x = a or b", ["boolean: x = a or b -> x = (a and b)"]),
        ("x = é * b", ["operator: x = é * b -> x = (é / b)"]),
        ("def f():\n    return g", ["return: return g -> return None"]),
        ("def f():\n    raise ValueError(a + 1)", ["raise: raise ValueError(a + 1) -> pass"]),
    ],
)
def test_each_kind_of_change_is_made(source: str, expected: list[str], tmp_path: Path) -> None:
    assert changes(tmp_path, source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Documentation."""',
        "def f(a: Literal[1]) -> Literal[2]: ...",
        "x: Literal[1]",
        "x = f'{1 + 2} steps' + name",
        "log.warning('%d', 1)",
        "x = 'one' if count == 1 else f'{count}'",
        "if TYPE_CHECKING:\n    x = 1",
        "def __repr__(self):\n    return 1",
        "from a import b",
        "Alias = int | None",
    ],
)
def test_texts_annotations_and_logging_are_left_alone(source: str, tmp_path: Path) -> None:
    assert changes(tmp_path, source) == []


def test_equal_changes_of_one_function_have_different_keys(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def f():\n    g()\n    g()\n")

    first, second = changes_of(tmp_path, "module.py")
    assert second.key == f"{first.key} (2)"
    assert second.apply((tmp_path / "module.py").read_bytes()) == b"def f():\n    g()\n    pass\n"


def test_the_interval_is_that_of_wilson() -> None:
    assert wilson(91, 112) == pytest.approx((0.730309, 0.873965), abs=1e-6)  # statsmodels 0.15.0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.long
def test_a_toy_package_has_the_known_survivor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "LEAST_CAP_S", patience(1))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    module, tests, reasons = (
        tmp_path / "src" / "toy" / "module.py",
        tmp_path / "tests" / "test_module.py",
        tmp_path / "equivalents.json",
    )
    for path, text in ((module, SOURCE), (tests, TESTS), (reasons, json.dumps({EQUAL: "Both branches agree."}))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def measure(*arguments: str) -> str:
        assert main(arguments, tmp_path, {"src/toy": "a toy"}, reasons, ["pytest"]) == 0
        return capsys.readouterr().out

    first = measure("--seed", "3", "--count", "4")
    rest = measure()
    keys = {change.key for change in changes_of(tmp_path, "src/toy/module.py")}
    assert len(keys) == 9
    assert all((f" {key}  " in first) + (f" {key}  " in rest) == (key != EQUAL) for key in keys)
    assert "seed 3" in rest
    assert "9 of 9 changes: 6 killed, 1 timed out, 1 survived, 0 not run, 1 equivalent; detected 87.5%" in rest
    results = json.loads((tmp_path / "build" / "mutants" / "results.json").read_text())["results"]
    assert (results[BY_TWO]["status"], results[ENDLESS]["status"]) == ("survived", "timed out")
    assert module.read_text() == SOURCE

    listed = measure("--list")
    assert "-        steps = steps - 1\n+        steps = steps - 2\n" in listed
    assert listed.count("@@") == 2
    tests.write_text(TESTS.replace("== 0", "== 9"))  # fails without a change, too
    assert "6 killed, 1 timed out, 0 survived, 1 not run" in measure("--again")
    tests.write_text(TESTS.replace("countdown(4)", "countdown(5)"))
    assert "7 killed, 1 timed out, 0 survived" in measure("--again")


@pytest.mark.processes
def test_a_test_that_fails_without_the_change_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "src" / "toy").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "src" / "toy" / "module.py").write_text("def f():\n    return 1\n")
    (tmp_path / "tests" / "test_module.py").write_text(
        "from pathlib import Path\nfrom toy.module import f\n"
        "def test_module():\n    f()\n    runs = Path('runs')\n    before = runs.exists()\n    runs.touch()\n"
        "    assert not before\n"
    )
    (tmp_path / "equivalents.json").write_text("{}")
    main(["--seed", "1"], tmp_path, {"src/toy": "a toy"}, tmp_path / "equivalents.json", ["pytest"])

    assert "2 of 2 changes: 0 killed, 0 timed out, 0 survived, 2 not run" in capsys.readouterr().out
