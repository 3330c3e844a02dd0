"""`trainstack checkpoints`: list, verify, show and compare, with exit codes for scripts."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.checkpointing.support import flip_bit, make_checkpoint
from tests.helpers.modules import Classifier, train
from tests.helpers.patience import patience
from trainstack.checkpointing import Checkpoint, manifest, write_checkpoint
from trainstack.cli.main import main


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The checkpoints of a run of two epochs, and its export."""
    saving = ts.DefaultCheckpointerArguments()
    train(Classifier(validate=True), tmp_path, epochs=2, checkpointer_args=saving)
    return tmp_path / "checkpoints"


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `trainstack checkpoints ...`."""
    try:
        code = main(["checkpoints", *map(str, arguments)])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    return json.loads(call(capsys, *arguments, "--json")[1])


class TestLs:
    def test_lists_the_checkpoints_of_a_run(self, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = call(capsys, "ls", trained)
        head, *rows = out.splitlines()

        assert (code, err) == (0, "")
        assert head.split() == ["name", "kind", "step", "epoch", "created", "size", "backend", "metrics", "intact"]
        assert [row.split()[0] for row in rows] == [
            "checkpoint-000000006",
            "checkpoint-000000012",
            "checkpoint-model-000000012",
        ]
        assert rows[1].split()[1:4] == ["checkpoint", "12", "2"]
        assert all(" sp " in row and "val/loss " in row and row.endswith("sizes agree") for row in rows)

    def test_damage_is_named(self, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flip_bit(trained / "checkpoint-000000006" / "model.safetensors", 200)
        flip_bit(trained / "checkpoint-000000012" / "MANIFEST.json", 5)

        sizes = {entry["name"]: entry["problem"] for entry in as_json(capsys, "ls", trained)["checkpoints"]}
        bytes_ = {
            entry["name"]: entry["problem"] for entry in as_json(capsys, "ls", trained, "--verify")["checkpoints"]
        }

        assert sizes["checkpoint-000000006"] is None
        assert "model.safetensors is damaged" in bytes_["checkpoint-000000006"]
        assert "MANIFEST.json is damaged" in bytes_["checkpoint-000000012"]
        assert bytes_["checkpoint-model-000000012"] is None
        assert "NO: " in call(capsys, "ls", trained)[1]

    def test_json_has_kind_step_epoch_size_and_metrics(self, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        last = as_json(capsys, "ls", trained)["checkpoints"][1]

        assert (last["kind"], last["step"], last["epoch"], last["backend"]) == ("checkpoint", 12, 2, "sp")
        assert last["size"] > 1000
        assert set(last["metrics"]) >= {"val/loss", "train/loss_epoch"}

    def test_an_empty_folder_has_no_checkpoints(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert call(capsys, "ls", tmp_path) == (0, f"no checkpoints in {tmp_path}\n", "")


class TestVerify:
    def test_intact_checkpoints_are_counted(self, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = call(capsys, "verify", trained)

        assert code == 0
        assert out.count(": intact\n") == 3

    @pytest.mark.parametrize("file", ["MANIFEST.json", "model.safetensors", "state.safetensors", "state.json"])
    def test_one_flipped_bit_is_named(self, file: str, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flip_bit(trained / "checkpoint-000000012" / file, 100)

        for path in (trained, trained / "checkpoint-000000012"):
            code, out, _ = call(capsys, "verify", path)
            assert code == 1
            assert f"checkpoint-000000012/{file} is damaged" in out

    def test_the_folder_of_a_run_gives_the_same_result(self, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert call(capsys, "verify", trained.parent) == call(capsys, "verify", trained)

    def test_a_folder_other_than_a_checkpoint_is_an_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file.pt").write_bytes(b"x")
        for path in (tmp_path / "nowhere", tmp_path / "file.pt", tmp_path):
            code, _, err = call(capsys, "verify", path)
            assert code == 2
            assert err.count("\n") == 1
            assert str(path) in err


class TestShow:
    def test_shows_plan_versions_and_the_tree(self, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = call(capsys, "show", trained / "checkpoint-000000012")

        assert code == 0
        for text in ("global_batch           8", f"torch                  {torch.__version__}", "processes"):
            assert text in out
        assert "module_interface_state: 4 tensors, 83 elements, 332 B" in out
        assert any(line.split() == ["net.0.weight", "float32", "[8,", "6]"] for line in out.splitlines())

    def test_reads_no_tensor(self, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A flipped bit in the weights is not reported; only `verify` reads them."""
        file = trained / "checkpoint-000000012" / "model.safetensors"
        flip_bit(file, file.stat().st_size - 1)

        assert call(capsys, "show", trained / "checkpoint-000000012")[0] == 0

    def test_json_has_shapes_dtypes_and_values(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = ts.write_checkpoint(make_checkpoint(3, step=7), tmp_path, "some")
        shown = as_json(capsys, "show", path)

        assert shown["global step"] == 7
        assert shown["plan"] == {"train_batch_size": 8}
        assert shown["states"]["module_interface_state"]["encoder.weight"] == {"dtype": "float32", "shape": [3, 2]}
        assert shown["states"]["rng_state"]["numpy"][1] == {"dtype": "uint32", "shape": [624]}
        assert shown["states"]["history_state"]["loss"] == [0.5, "inf"]

    def test_shows_the_items_of_a_deque_and_a_set(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        held = {"memory": deque([torch.ones(4)] * 9, maxlen=10), "names": {"a"}}
        path = write_checkpoint(Checkpoint(module_interface_state=held), tmp_path, "a")
        _, out, _ = call(capsys, "show", path)

        assert "module_interface_state: 9 tensors, 36 elements" in out
        assert "    [0]                                  float32 [4]\n" in out
        assert "    ... and 7 more\n" in out
        assert "'a'" in out
        shown = as_json(capsys, "show", path)["states"]["module_interface_state"]
        assert shown["memory"][8] == {"dtype": "float32", "shape": [4]}
        assert shown["names"] == ["a"]

    def test_an_export_has_its_model_state(self, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "model_state: 4 tensors" in call(capsys, "show", trained / "checkpoint-model-000000012")[1]


class TestDiff:
    def test_the_same_run_twice_has_the_same_bits(
        self, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train(Classifier(validate=True), tmp_path / "b", epochs=2, checkpointer_args=ts.DefaultCheckpointerArguments())
        names = "checkpoint-000000012", "checkpoint-model-000000012"
        for name in names:
            other = tmp_path / "b" / "checkpoints" / name
            assert call(capsys, "diff", "--model", trained / name, other)[0] == 0
            assert call(capsys, "diff", trained / name, trained / name)[:2][0] == 0

    def test_counts_elements_and_measures_them(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        one, other = make_checkpoint(1, step=1), make_checkpoint(1, step=1)
        assert other.module_interface_state is not None
        other.module_interface_state["encoder.weight"] = torch.tensor([[1.0, 1.0], [1.5, 1.0], [1.0, 0.75]])
        other.module_interface_state["encoder.bias"] = -one.module_interface_state["encoder.bias"] * 0  # type: ignore[index]
        one.module_interface_state["encoder.bias"] *= 0  # type: ignore[index]
        other.plan = {"train_batch_size": 9}
        paths = [ts.write_checkpoint(c, tmp_path, name) for c, name in ((one, "a"), (other, "b"))]
        code, out, _ = call(capsys, "diff", *paths)

        assert code == 1
        assert "module_interface_state['encoder.weight']: 2 elements differ, by at most 0.5 (float32 [3, 2])" in out
        assert "encoder.bias']: 2 elements differ, by at most 0 " in out  # 0.0 and -0.0
        assert "plan.train_batch_size: 8 | 9" in out
        assert out.endswith("3 differences in all states, plans and versions\n")
        assert [row["elements"] for row in as_json(capsys, "diff", *paths)["differences"]] == [2, 2, None]

    def test_entries_of_only_one_checkpoint_are_absent_in_the_other(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        one, other = make_checkpoint(1), make_checkpoint(1)
        one.callback_states = {"ema": {"decay": 0.5, "nan": float("nan")}}
        other.callback_states = {"ema": {"nan": float("nan"), "weight": torch.ones(2)}}
        paths = [ts.write_checkpoint(c, tmp_path, name) for c, name in ((one, "a"), (other, "b"))]

        assert call(capsys, "diff", *paths)[1].splitlines()[:2] == [
            "callback_states.ema.decay: 0.5 | absent",
            "callback_states.ema.weight: absent | float32 [2]",
        ]

    def test_an_export_is_compared_with_the_model_of_a_checkpoint(
        self, trained: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        last, export = trained / "checkpoint-000000012", trained / "checkpoint-model-000000012"

        assert call(capsys, "diff", last, export)[:2] == (0, "the weights agree in every bit\n")
        assert call(capsys, "diff", trained / "checkpoint-000000006", export)[0] == 1

    def test_a_damaged_checkpoint_is_not_compared(self, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        last = trained / "checkpoint-000000012"
        flip_bit(last / "model.safetensors", 200)
        code, out, err = call(capsys, "diff", trained / "checkpoint-000000006", last)

        assert (code, out) == (2, "")
        assert "model.safetensors is damaged" in err


def test_a_newer_format_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as later:
        later.setattr(manifest, "FORMAT_VERSION", 99)
        path = ts.write_checkpoint(make_checkpoint(1), tmp_path, "some")

    assert "has format version 99" in as_json(capsys, "ls", tmp_path)["checkpoints"][0]["problem"]
    for arguments in (("show", path), ("diff", path, path), ("verify", path)):
        code, _, err = call(capsys, *arguments)
        assert code == 2
        assert err.startswith("trainstack: ")
        assert "Upgrade trainstack" in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["ls"], ["ls", "a", "b"], ["list"], ["ls", ".", "--colour"], []])
def test_a_wrong_command_line_is_refused_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *words)

    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "--help" in err


@pytest.mark.processes
def test_the_module_runs_as_the_command(trained: Path) -> None:
    command = [sys.executable, "-m", "trainstack", "checkpoints", "verify", str(trained)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(30), check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("intact") == 3


@pytest.mark.parametrize(
    ("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)], ids=str
)
def test_colours_depend_on_the_variables_of_a_terminal(
    variables: dict[str, str], coloured: bool, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, follower = pty.openpty()
    for name, value in {"NO_COLOR": "", "TERM": "xterm-256color", "COLUMNS": "200", **variables}.items():
        monkeypatch.setenv(name, value)
    with os.fdopen(follower, "w") as terminal, contextlib.redirect_stdout(terminal):
        assert main(["checkpoints", "ls", str(trained)]) == 0
    read = b""
    with contextlib.suppress(OSError):  # at the end
        while data := os.read(leader, 1 << 16):
            read += data
    os.close(leader)
    out = read.decode()

    assert "checkpoint-000000012" in out
    assert ("\x1b[" in out) is coloured


def test_ls_finds_the_checkpoints_of_an_output_dir(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "ls", trained.parent)

    assert code == 0
    assert out == call(capsys, "ls", trained)[1]
    assert "checkpoint-" in out
