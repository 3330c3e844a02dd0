"""The report of a run, for each kind of end."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train
from trainstack.trainer.reporting.report.chart import Scale, chart
from trainstack.trainer.reporting.report.facts import RunFacts
from trainstack.trainer.reporting.report.markup import Markup, tag
from trainstack.trainer.reporting.report.page import page_of
from trainstack.trainer.reporting.report.panels import MOST_CURVES, Panel, Series, panels_of, thin
from trainstack.trainer.reporting.report.runs import ReportedRun, read_run

SAVING = ts.DefaultCheckpointerArguments()


class Fails(Classifier):
    """Raises `by` in the seventh step, or sends it if it is a signal."""

    def __init__(self, *, by: BaseException | signal.Signals | None = None, **changes: Any) -> None:
        super().__init__(**changes)
        self.by = by

    def on_end_train_step(self, global_step: int, loss: Any) -> None:
        if global_step == 7 and isinstance(self.by, signal.Signals):
            os.kill(os.getpid(), self.by)
        elif global_step == 7 and self.by is not None:
            raise self.by


def text_of(page: Path) -> str:
    """The page without tags."""
    return re.sub(r"\s+", " ", re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", page.read_text(), flags=re.S))


def report(directory: Path, module: ts.ModuleInterface | None = None, **changes: Any) -> str:
    made = {"epochs": 2, "log_every": 1, "writers": ["csv"]}
    train(module or Classifier(validate=True, scheduler=True), directory, **made | changes)
    return text_of(directory / "report.html")


class TestOneRun:
    @pytest.mark.spec("PA-39", "HZ-36")
    def test_the_report_has_all_its_sections(self, tmp_path: Path) -> None:
        text = report(tmp_path, backend="sp-bf16", checkpointer_args=SAVING, train_batch_size=4, gpu_batch_size_limit=2)

        assert "Classifier finished" in text
        assert "samples 41 per epoch batch 4 samples = 1 process x 2 micro-batches x 2" in text
        assert "optimizer SGD: lr 0.1" in text
        assert " ".join(ts.explain("sp-bf16").split()) in text.replace("&gt;", ">").replace("&#x27;", "'")
        for title in ("loss", "gradient norm", "learning rate", "steps a second", "memory, GiB"):
            assert f" {title} " in text
        for name in ("train/loss", "train/loss_epoch", "val/loss", "lr", "train/grad_norm", "memory/host_peak"):
            assert f" {name} " in text
        assert "checkpoint-000000022" in text
        assert "NOT PRIVATE: backend &#x27;sp-bf16&#x27; has no privacy layer" in text
        assert "gpu_batch_size_limit 2" in text
        assert f"torch {torch.__version__}" in text

    def test_every_value_of_the_history_is_in_its_curves(self, tmp_path: Path) -> None:
        trainer = train(Classifier(validate=True), tmp_path, epochs=2, log_every=1, writers=["csv"])
        page = (tmp_path / "report.html").read_text()
        for name in ("train/loss", "val/loss"):
            values = [float(f"{value:.6g}") for value in trainer.history.get_metric_values(name)]
            assert f'data-values="{json.dumps(values)}"' in page

    @pytest.mark.parametrize(
        ("changes", "written"),
        [
            ({"writers": []}, False),
            ({"writers": ["stdout"]}, False),
            ({"writers": ["csv"]}, True),
            ({"writers": ["jsonl"]}, True),
            ({"writers": [], "report": True}, True),
            ({"writers": ["csv"], "report": False}, False),
            ({"writers": ["csv"], "report": True, "fast_dev_run": True}, False),
        ],
    )
    def test_it_is_written_with_log_files_by_default(
        self, changes: dict[str, Any], written: bool, tmp_path: Path
    ) -> None:
        train(Classifier(), tmp_path, **changes)
        assert sorted(
            path.name for path in tmp_path.rglob("r*.*") if path.name not in ("run-record.json", "rank-00000.log")
        ) == (["report.html", "run.json"] if written else [])

    def test_a_new_run_keeps_the_report_of_an_earlier_one(self, tmp_path: Path) -> None:
        report(tmp_path, epochs=1)
        first = (tmp_path / "report.html").read_bytes()
        with pytest.raises(ts.ConfigurationError, match="holds a run already"):
            report(tmp_path, epochs=2)
        assert (tmp_path / "report.html").read_bytes() == first
        report(tmp_path, epochs=2, overwrite=True)
        assert len(RunFacts.read(tmp_path).sessions) == 1

    def test_a_report_that_cannot_be_written_is_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        class Blocks(Classifier):
            def on_end_train(self, global_step: int) -> None:
                (tmp_path / "report.html").mkdir()

        train(Blocks(), tmp_path, writers=["csv"])
        assert "the run report could not be written: IsADirectoryError" in caplog.text


class TestEndings:
    def test_the_report_of_a_failed_run_has_error_and_records(self, tmp_path: Path) -> None:
        with pytest.raises(KeyError):
            report(tmp_path, Fails(by=KeyError("<labels>"), validate=True))
        text = text_of(tmp_path / "report.html")
        assert "Fails failed" in text
        assert "failed: KeyError: &#x27;&lt;labels&gt;&#x27;" in text
        assert [run.curves["train/loss"][0].tolist() for run in [read_run(tmp_path, "")]] == [[1, 2, 3, 4, 5, 6]]
        assert " train/loss " in text

    def test_values_on_a_failed_device_are_not_read(self) -> None:
        history = ts.RunHistory()
        history.update_metric("before", 1.0, step=1)
        history.update_metric("waits", torch.tensor(2.0), step=1)
        assert set(history.all_arrays(read_device=False)) == {"before"}
        assert set(history.all_arrays()) == {"before", "waits"}

    def test_a_resumed_run_continues_the_report(self, tmp_path: Path) -> None:
        made: dict[str, Any] = {"epochs": 2, "log_every": 1, "writers": ["csv"], "checkpointer_args": SAVING}
        with pytest.raises(ts.Preempted):
            train(Fails(by=signal.SIGTERM), tmp_path, **made)
        assert "Fails interrupted" in text_of(tmp_path / "report.html")

        train(Fails(by=ts.StopTraining("good enough")), tmp_path, **made | {"resume": True, "epochs": 3})
        text = text_of(tmp_path / "report.html")
        sessions = RunFacts.read(tmp_path).sessions
        assert [(s.status, s.first_step, s.last_step) for s in sessions] == [("interrupted", 0, 7), ("finished", 7, 18)]
        assert not (tmp_path / "report.1.html").exists()
        assert "Fails finished" in text

    def test_the_report_of_a_stopped_run_has_the_reason(self, tmp_path: Path) -> None:
        text = report(tmp_path, Fails(by=ts.StopTraining("good enough")))
        assert "Fails stopped" in text
        assert "good enough" in text

    def test_a_killed_session_is_not_shown_as_running(self, tmp_path: Path) -> None:
        report(tmp_path)
        facts = json.loads((tmp_path / "run.json").read_text())
        killed = {**facts["sessions"][0], "status": "running", "seconds": None, "last_step": None, "samples": []}
        facts["sessions"][0]["seconds"] = 2.5
        facts["sessions"] = [killed, *facts["sessions"]]
        (tmp_path / "run.json").write_text(json.dumps(facts))
        page = page_of([read_run(tmp_path, "resumed")])
        assert "2.5 s, without 1 killed session" in page
        assert "<td>killed</td>" in page
        assert "running, or killed" not in page

    def test_a_killed_run_has_a_report(self, tmp_path: Path) -> None:
        report(tmp_path)
        facts = json.loads((tmp_path / "run.json").read_text())
        facts["sessions"][0] |= {"status": "running", "seconds": None, "last_step": None, "samples": []}
        (tmp_path / "run.json").write_text(json.dumps(facts))
        run = read_run(tmp_path, "killed")
        assert [panel.title for panel in panels_of([run])] == ["loss", "gradient norm", "learning rate"]


def test_a_page_draws_at_most_300_metrics() -> None:
    names = [*(f"m/{number}" for number in range(5000)), "train/loss", "lr", "val/loss"]
    curves = {name: (np.arange(3), np.ones(3)) for name in names}
    page = page_of([ReportedRun(label="a", facts=RunFacts(name="a"), curves=curves)])
    assert page.count("<figure") <= MOST_CURVES
    assert "300 of 5,003 metrics are drawn." in page
    assert all(f"<figcaption>{title}" in page for title in ("loss", "learning rate", "m/0"))
    assert "are drawn" not in page_of([ReportedRun(label="a", facts=RunFacts(name="a"), curves={"m": curves["m/0"]})])


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("logged", [False, True])
def test_the_training_loss_of_a_private_run_is_not_shown(logged: bool, tmp_path: Path) -> None:
    """Also if the files have it: users share reports with others."""
    privacy = ts.DifferentialPrivacyArguments(delta=1e-4, noise_multiplier=1.0, accountant="rdp", log_train_loss=logged)
    text = report(
        tmp_path,
        Classifier(validate=True),
        backend="sp-dp",
        differential_privacy_args=privacy,
        checkpointer_args=SAVING,
    )
    assert ("train/loss" in ts.read_history(tmp_path).get_metric_names()) == logged
    assert "train/loss" not in text
    assert " val/loss " in text
    assert "-differentially private for one item of the training data set." in text


def test_the_report_of_a_private_run_hides_error_messages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the loss"):
        report(tmp_path, Fails(by=ValueError("the loss is 1.234")), backend="sp-dp")
    assert "1.234" not in (tmp_path / "report.html").read_text()
    assert "failed: ValueError" in text_of(tmp_path / "report.html")


class TestDrawing:
    def test_text_is_escaped_and_markup_is_not(self) -> None:
        made = tag("p", "<b>", Markup("<i/>"), None, title='"x"', class_=None)
        assert made == '<p title="&quot;x&quot;">&lt;b&gt;<i/></p>'

    def test_thinned_curves_keep_their_peaks_and_gaps(self) -> None:
        values = np.sin(np.arange(100_000) / 50)
        values[12_345], values[54_321], values[77_777] = 9.0, -9.0, math.nan
        kept = thin(values, 600)
        assert len(kept) <= 603
        assert {0, 12_345, 54_321, 77_777, 99_999} <= set(kept.tolist())
        assert thin(values[:600], 600).tolist() == list(range(600))

    def test_values_that_are_not_finite_become_gaps(self) -> None:
        drawn = chart(Panel(title="t", series=(curve([1.0, math.nan, 3.0, 4.0, math.inf]),)))
        assert drawn.count("M") == 1
        assert "2 not finite" in drawn
        assert "NaN" not in drawn
        assert "Infinity" not in drawn

    @pytest.mark.parametrize("values", [[], [5.0], [0.0, 0.0], [math.nan], [1e308, -1e308], [1e-320, 1.0], [1e16] * 3])
    def test_any_values_can_be_drawn(self, values: list[float]) -> None:
        drawn = chart(Panel(title="t", series=(curve(values),)))
        assert "nan" not in drawn.split("data-")[0]

    def test_ticks_are_round_numbers(self) -> None:
        assert Scale(0.0, 1.05, 0, 1).ticks(5) == pytest.approx([0, 0.5, 1.0])
        assert Scale(3, 288, 0, 1).ticks(6) == [50, 100, 150, 200, 250]
        assert Scale(0.02, 3, 0, 1, log=True).ticks(5) == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2])


def curve(values: list[float]) -> Series:
    lost = sum(not math.isfinite(value) for value in values)
    return Series(label="s", steps=list(range(len(values))), values=values, colour=0, not_finite=lost)


def test_the_recorder_measures_memory_at_log_points_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr("trainstack.trainer.reporting.report.recorder.host_peak_gib", lambda: looked.append(1) or 0.0)
    trainer = ts.Trainer(Classifier(), arguments(tmp_path, epochs=5, log_every=10, writers=["csv"]))
    trainer.train()
    assert len(looked) == trainer.global_steps_finished // 10
