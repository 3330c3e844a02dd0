"""A forged `run.json` gives an error of one sentence, never a traceback."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, numbers
from trainstack.cli.main import main


def train(folder: Path, **changes: Any) -> None:
    given = {"train_batch_size": 8, "log_every": 1, "progress": "none", "output_dir": folder}
    ts.Trainer(Classifier(numbers(16)), ts.TrainerArguments(**{**given, **changes})).train()


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("run")
    train(folder)
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


HOSTILE = [
    None,
    True,
    "x",
    -1,
    1 << 70,
    1e300,
    math.nan,
    math.inf,
    [],
    {},
    [[]],
    [1],
    {"a": 1},
    "\0",
    [["a", "b", "c"]],
]


def variants(values: Any) -> Iterator[Any]:
    """`values` with one part after another replaced by each of `HOSTILE`, or removed."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield {name: one for name, one in values.items() if name != key}
            yield from ({**values, key: other} for other in HOSTILE)
            if key in ("sessions", "samples", "plan", "model", "environment"):
                yield from ({**values, key: other} for other in variants(value))
    elif isinstance(values, list) and values:
        yield from ([other, *values[1:]] for other in HOSTILE)
        yield from ([other, *values[1:]] for other in variants(values[0]))


def test_no_value_of_any_part_causes_a_traceback(
    facts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = set()
    for values in variants(facts):
        (tmp_path / "run.json").write_text(json.dumps(values))
        for command in (["report", str(tmp_path)], ["interrupted", str(tmp_path)]):
            codes.add(main(command))  # which raises any error other than the library's
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert len(said.err.splitlines()) <= 2
    assert {0, 1} <= codes


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"format": 1, "arguments": ' + '{"a": ' * 900 + "1" + "}" * 900 + ', "sessions": []}',
        '{"format": 1, "name": "x", "sessions": [], "plan": [], "model": [], "environment": [], "arguments": '
        + '{"a": ' * 200
        + "1"
        + "}" * 200
        + "}",
        "1" * 10_000,
        "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
        "",
    ],
)
def test_nested_and_truncated_files_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(text)

    assert main(["report", str(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert "is not the file of a run" in said
    assert len(said) < 600


@pytest.mark.parametrize("row", ["9" * 30 + ",0,a,1.0", "1,0,=a,1.0", "1,0,\0,1.0", '1,0,"a,1.0', "1,0,a,1e999"])
def test_invalid_rows_are_ignored(row: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(f"step,epoch,name,value\n{row}\n1,0,good,2.0\n")

    assert main(["report", str(tmp_path)]) == 0
    assert ts.read_history(tmp_path).get_metric_values("good") == [2.0]


def test_invalid_lines_are_ignored(tmp_path: Path) -> None:
    good = '{"name": "good", "value": 2.0, "step": 1, "epoch": 0}\n'
    nested = '{"name": "a", "value": ' + "[" * 100_000 + "\n"
    large = '{"name": "a", "value": 1, "step": 1' + "0" * 40 + ', "epoch": 0}\n'
    (tmp_path / "metrics.jsonl").write_text(good + nested + large)

    assert ts.read_history(tmp_path).get_metric_names() == {"good"}


def test_a_resumed_run_renames_an_invalid_run_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path)
    (tmp_path / "run.json").write_text("[" * 100_000)
    train(tmp_path, resume=True, epochs=2)

    assert "was renamed to run.1.json" in caplog.text
    assert main(["report", str(tmp_path)]) == 0
