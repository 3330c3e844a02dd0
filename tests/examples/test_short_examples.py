"""Short runs of the examples that have no separate test; a second run continues the first."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tests.helpers.scripts import run_python
from trainstack import read_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HELPERS = {"curves.py", "private_curves.py", "demo.py"}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.name not in HELPERS)


def run(directory: Path, script: str, *arguments: str) -> str:
    done = run_python("-W", "error", str(EXAMPLES / script), *arguments, cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_of(folder: Path) -> list[float]:
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        return [float(row["value"]) for row in csv.DictReader(file) if row["name"] in ("train/loss", "val/loss")]


@pytest.mark.processes
def test_the_transformer_learns_the_same_with_split_batches(tmp_path: Path) -> None:
    small = ("--width", "8", "--layers", "1", "--max-steps", "10", "--device", "cpu")
    whole = run(tmp_path, "characters.py", *small, "--output-dir", "whole")
    split = run(tmp_path, "characters.py", *small, "--output-dir", "split", "--micro-batch", "8")
    assert "1 process x 1 micro-batch x 32" in whole
    assert "1 process x 4 micro-batches x 8" in split
    losses = [losses_of(tmp_path / folder) for folder in ("whole", "split")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert 4 < float(re.search(r"^([\d.]+) bits a character", whole, re.M)[1]) < 7, (
        "a uniform choice of 128 characters has 7"
    )


@pytest.mark.processes
def test_a_run_at_an_address_is_uploaded(tmp_path: Path) -> None:
    said = run(tmp_path, "remote.py", "memory://bucket/line", "--local-dir", "copy", "--epochs", "1")
    assert "uploaded: memory://bucket/line" in said
    assert (tmp_path / "copy" / "checkpoints" / "last").is_file()


@pytest.mark.processes
def test_two_optimizers_learn_two_tasks_that_are_evaluated_by_name(tmp_path: Path) -> None:
    said = run(tmp_path, "multitask.py", "--epochs", "2", "--device", "cpu")
    epochs = [line for line in said.splitlines() if line.startswith("epoch=2/2")]
    assert len(epochs) == 1
    assert "val/digits/accuracy" in epochs[0]
    assert "val/pixels/loss" in epochs[0]
    assert float(re.search(r"^digits: ([\d.]+)% right", said, re.M)[1]) > 30
    again = run(tmp_path, "multitask.py", "--epochs", "2", "--device", "cpu")
    assert "nothing is left to do" in again
    assert said.splitlines()[-2:] == again.splitlines()[-2:]


@pytest.mark.processes
def test_the_student_is_taught_and_exported_without_its_teacher(tmp_path: Path) -> None:
    said = run(tmp_path, "distillation.py", "--epochs", "2", "--device", "cpu")
    right = {name.strip(): float(share) for name, share in re.findall(r"^(.{15}) .* ([\d.]+)% right$", said, re.M)}
    assert list(right) == ["teacher", "student alone", "student taught"]
    assert right["teacher"] > 60
    assert right["student taught"] > 30
    student = read_model(tmp_path / "runs" / "distillation" / "student")
    assert sorted(student) == ["0.bias", "0.weight", "2.bias", "2.weight"]


@pytest.mark.processes
def test_a_gan_logs_both_losses_and_draws_digits(tmp_path: Path) -> None:
    printed = run(tmp_path, "gan.py", "--epochs", "1", "--device", "cpu")
    assert re.search(r"^epoch=1/1 step=29 .*train/discriminator=\S+ train/generator=\S+", printed, re.M)
    picture = printed.splitlines()[-8:]
    assert {len(line) for line in picture} == {6 * 16 + 5 * 2}
    assert len(set("".join(picture))) > 3


@pytest.mark.processes
def test_adapters_learn_over_a_frozen_base_and_are_saved_alone(tmp_path: Path) -> None:
    printed = run(tmp_path, "lora.py", "--epochs", "8", "--device", "cpu")
    before, after = map(float, re.search(r"^turned +([\d.]+)% correct before, ([\d.]+)% after", printed, re.M).groups())
    assert after > before + 30
    assert f"loaded    {after}% with the saved adapters" in printed
    folder = tmp_path / "runs" / "lora"
    assert sorted(read_model(folder / "adapters")) == [
        f"{layer}.{name}" for layer in (1, 3, 5) for name in ("down", "up")
    ]
    frozen = [name for path in folder.glob("turned/checkpoints/checkpoint-model-*") for name in read_model(path)]
    assert frozen
    assert not [name for name in frozen if ".base." in name]


@pytest.mark.processes
@pytest.mark.parametrize(("options", "largest"), [((), 0.0), (("--micro-batch", "100"), 1e-10)], ids=["whole", "split"])
def test_lbfgs_fits_like_a_plain_loop(tmp_path: Path, options: tuple[str, ...], largest: float) -> None:
    printed = run(tmp_path, "lbfgs.py", "--epochs", "3", *options)
    assert float(re.search(r"^largest difference: (\S+)$", printed, re.M)[1]) <= largest
    assert ("the same bits as a plain loop: True" in printed) is (not options)


@pytest.mark.processes
def test_an_agent_plays_until_the_task_is_solved(tmp_path: Path) -> None:
    printed = run(tmp_path, "cartpole.py", "--episodes", "200", "--goal", "15")
    assert re.search(r"^episode +20  #+ \d+$", printed, re.M)
    assert re.search(r"^solved: \d+ steps on average in the last 20 episodes$", printed, re.M)


@pytest.mark.long
@pytest.mark.processes
def test_a_replay_has_the_same_bits_and_another_finds_the_edit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "replay.py"), "--epochs", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same bits: steps 11 to 20 (" in done.stdout
    assert "NOT THE SAME: step 11, data, rank 0: batch" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_each_example_has_a_page_with_code_and_command(name: str) -> None:
    page = (ROOT / "docs" / "examples" / f"{name}.md").read_text(encoding="utf-8")
    assert f'--8<-- "{name}.py"' in page
    script = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    commands = re.findall(rf"^(?:python|torchrun --nproc-per-node=\d+) examples/{name}\.py(.*)$", page, re.M)
    assert commands
    for option in re.findall(r"--[a-z-]+", " ".join(commands)):
        assert f'"{option}"' in script, f"{name}.md runs it with {option}, which the script lacks"
