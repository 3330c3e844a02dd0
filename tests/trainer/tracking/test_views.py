"""Reprs, tables, frames and plots of a run, and the display in notebooks."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from trainstack.trainer.tracking.progress import NotebookProgress, PlainProgress, build_progress
from trainstack.trainer.tracking.views import epochs_html


@pytest.fixture
def history() -> ts.RunHistory:
    history = ts.RunHistory()
    for step in range(1, 5):
        history.update_metric("train/loss", 1.0 / step, step=step, epoch=(step - 1) // 2)
    history.update_metric("val/loss", 0.125, step=4, epoch=1)
    return history


def test_the_repr_of_a_history_has_the_newest_values(history: ts.RunHistory) -> None:
    assert repr(history) == "RunHistory(5 records: train/loss=0.25, val/loss=0.125)"
    history.update_metric("acc", torch.tensor(0.5))
    assert "acc" not in repr(history)
    assert repr(ts.RunHistory()) == "RunHistory(0 records: none)"


def test_a_history_as_html_is_a_table_of_epochs(history: ts.RunHistory) -> None:
    html = history._repr_html_()
    assert html.count("<tr>") == 3
    assert "<tr><td>1</td><td>0.5</td><td></td></tr><tr><td>2</td><td>0.25</td><td>0.125</td></tr>" in html
    history.update_metric("<b>", 1.0, step=4, epoch=1)
    assert "&lt;b&gt;" in history._repr_html_()


def test_only_the_last_50_epochs_are_shown() -> None:
    html = epochs_html({epoch: {"loss": 1.0} for epoch in range(200)})
    assert html.count("<tr>") == 51
    assert "the last 50 of 200 epochs" in html


def test_a_history_converts_to_a_data_frame(history: ts.RunHistory) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    history.update_metric("val/loss", 0.0625, step=4, epoch=1)
    frame = history.to_frame()
    assert list(frame.columns) == ["epoch", "train/loss", "val/loss"]
    assert frame.index.tolist() == [1, 2, 3, 4]
    assert frame.index.name == "step"
    assert frame["epoch"].tolist() == [0, 0, 1, 1]
    assert frame["val/loss"].isna().tolist() == [True, True, True, False]
    assert frame["val/loss"][4] == 0.0625
    assert ts.RunHistory().to_frame().empty


def test_a_history_plots_its_metrics(history: ts.RunHistory) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    history.update_metric("lr", 0.1, step=4, epoch=1)
    axes = history.plot()
    assert [place.get_ylabel() for place in axes] == ["loss", "lr"]
    assert [line.get_label() for line in axes[0].lines] == ["train/loss", "val/loss"]
    assert axes[0].lines[0].get_ydata().tolist() == history.get_metric_values("train/loss")
    assert len(history.plot("lr")) == 1
    pyplot.close("all")
    with pytest.raises(ts.ConfigurationError, match="Did you mean 'lr'"):
        history.plot("lrr")
    with pytest.raises(ts.ConfigurationError, match="nothing has been recorded yet"):
        ts.RunHistory().plot()


@pytest.mark.parametrize(
    ("package", "call"),
    [("pandas", lambda history: history.to_frame()), ("matplotlib", lambda history: history.plot())],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, history: ts.RunHistory, package: str, call: Any
) -> None:
    importing = builtins.__import__

    def missing(name: str, *more: Any, **named: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return importing(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ts.MissingExtraError, match=rf"package '{package}'.*trainstack\[plot\]"):
        call(history)


def test_the_repr_of_a_trainer_has_its_progress(tmp_path: Path) -> None:
    seen = []
    trainer = ts.Trainer(Classifier(numbers(16)), arguments(tmp_path, epochs=2))
    assert repr(trainer) == f"Trainer(Classifier, backend='sp', not started, epoch 0 of 2, step 0, {tmp_path})"
    trainer.on(ts.Event.TRAIN_STEP_END, once=3)(lambda trainer: seen.append(repr(trainer)))
    trainer.train()
    assert "training, epoch 1 of 2, step 3" in seen[0]
    assert "finished, epoch 2 of 2, step 4" in repr(trainer)
    assert trainer._repr_html_().startswith("<p>Trainer(Classifier, backend=&#x27;sp&#x27;")
    assert "<th>train/loss_epoch</th>" in trainer._repr_html_()


def test_results_have_a_short_repr(tmp_path: Path) -> None:
    trainer = train(Classifier(numbers(16), validate=True), tmp_path, epochs=1)
    outputs = trainer.validate()
    assert f"<td>val/loss</td><td>{outputs.metrics['val/loss']}</td>" in outputs._repr_html_()
    found = ts.find_lr(ts.Trainer(Classifier(), arguments(tmp_path / "other")), start=1e-4, end=1e-2, steps=5)
    assert repr(found) == f"LRFinderResult(suggestion={found.suggestion}, 5 rates: 0.0001 to 0.01)"


class Outputs:
    """IPython's `display`: keeps the outputs, and how often each was updated."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.updates = 0

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Outputs:
        assert raw
        assert display_id
        self.shown.append(content)
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        self.shown[-1] = content
        self.updates += 1


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Outputs:
    outputs = Outputs()
    package, display = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display.display = outputs.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return outputs


def test_a_notebook_output_has_the_bar_then_the_table(kernel: Outputs, tmp_path: Path) -> None:
    class Looks(Classifier):
        def on_end_train_epoch(self, global_step: int) -> None:
            seen.append(kernel.shown[0]["text/html"])

    seen: list[str] = []
    train(Looks(numbers(16), validate=True), tmp_path, epochs=3, progress="auto")
    assert len(kernel.shown) == 1
    assert kernel.updates > 0
    assert seen[0].startswith('<progress value="')
    assert "epoch 1/3" in seen[0]
    html = kernel.shown[0]["text/html"]
    assert "<progress" not in html
    assert html.count("<tr>") == 4
    assert "<th>train/loss</th><th>val/loss</th>" in html


def test_outside_of_a_kernel_progress_is_plain(kernel: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build_progress("auto"), NotebookProgress)
    assert isinstance(build_progress("notebook"), NotebookProgress)
    sys.modules["IPython"].get_ipython = lambda: None  # type: ignore[attr-defined]
    assert isinstance(build_progress("auto"), PlainProgress)
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(ts.MissingExtraError, match=r"trainstack\[notebook\]"):
        build_progress("notebook")


def test_ipython_shows_reprs_and_the_display(tmp_path: Path) -> None:
    pytest.importorskip("IPython", reason="needs ipython")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    with capture_output() as captured:
        trainer = train(Classifier(numbers(16)), tmp_path, epochs=1, progress="notebook")
    assert "<table>" in captured.outputs[-1].data["text/html"]
    data, _ = shell.display_formatter.format(trainer.history)
    assert data["text/html"] == trainer.history._repr_html_()
    assert data["text/plain"] == repr(trainer.history)
