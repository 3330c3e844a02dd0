"""The examples that are ported from other libraries train on real data and reach the stated results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trainstack.cli.main import main as command

PORTED = Path(__file__).resolve().parents[2] / "examples" / "ported"


@pytest.fixture(autouse=True)
def _in_a_separate_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "hezar_config", raising=False)  # the command line puts it there


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PORTED / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.spec("PMT-01", "PMT-02")
@pytest.mark.parametrize("backend", ["sp", "sp-bf16"])
def test_a_module_written_for_pymarlin_trains_on_any_backend(backend: str) -> None:
    trainer = example("pymarlin_cifar").main(backend)
    assert trainer.global_steps_finished == 4 * 45
    assert trainer.history.get_latest_metric("val/accuracy") > 80
    assert not list(Path().rglob("checkpoint*")), "it turns checkpoints off"


@pytest.mark.spec("PA-01", "PA-15", "PA-38")
def test_an_accelerated_script_trains_schedules_measures_and_keeps_the_best() -> None:
    trainer, tested = example("accelerated_metrics").main()
    assert tested["test/accuracy"] > 0.9
    assert {"test/precision", "test/recall", "test/loss"} <= tested.keys()
    rates = trainer.history.get_metric_values("lr")
    assert max(rates) > 10 * rates[-1], "the cycle covers the whole run: the rate rises and falls"
    values = trainer.history.get_metric_values("val/accuracy")
    assert trainer.validate().metrics["val/accuracy"] == max(values), "the weights are the best, not the last"
    assert trainer.events.callbacks["CountsEpochs"].epochs == 6


@pytest.mark.spec("FN-10", "FN-14", "FN-15", "FN-37", "FN-38")
def test_a_fastnlp_script_calls_subscribers_at_the_configured_times() -> None:
    trainer, notes = example("fastnlp_on").main()
    assert notes[0] == "lr 0.005"
    assert [note for note in notes if note.startswith("epoch")] == ["epoch 2", "epoch 5"]
    assert len([note for note in notes if note.startswith("acc")]) == 4, "every second of eight epochs"
    assert trainer.history.get_latest_metric("val/acc") > 0.9


@pytest.mark.spec("HZ-10", "HZ-19", "HZ-20", "HZ-21", "HZ-24")
def test_a_hezar_configuration_trains_saves_and_continues() -> None:
    trainer = example("hezar_config").main()
    steps = trainer.plan.total_steps
    accuracy = trainer.history.get_latest_metric("val/accuracy")
    assert accuracy > 2 / 6, "six chapters, of which the longest has a fifth of the texts"
    logged = [record.step for record in trainer.history.records("train/loss")]
    assert logged[0] == -(-steps // 10), "a tenth of the steps, rounded up"
    assert len(logged) >= 9
    kept = [path.name for path in Path("runs/hezar/checkpoints").iterdir() if path.is_dir()]
    assert f"checkpoint-{steps:09d}" in kept
    assert trainer.checkpointer.best().metrics["val/accuracy"] == max(trainer.history.get_metric_values("val/accuracy"))
    again = example("hezar_config").main()
    assert again.global_steps_finished == steps, "resume: auto finds the finished run"


@pytest.mark.spec("HZ-10")
def test_the_command_line_trains_the_configuration_with_overriding_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--epochs", "1", "--module.optimizer", "sgd", "--progress", "none", "--output_dir", "elsewhere"]
    file = PORTED / "hezar_config"
    assert command(["train", f"{file}.py:chapters", "--config", f"{file}.yaml", *options]) == 0
    assert "epoch=1/1" in capsys.readouterr().out
    assert list(Path("elsewhere/checkpoints").glob("checkpoint-0*"))
