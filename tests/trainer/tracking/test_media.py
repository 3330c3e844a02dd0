"""Images, texts, tables and files for the writers, and the status of a run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from tests.helpers.processes import run_world
from tests.helpers.workers.media import logged_over_processes
from trainstack.testing import run_step
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.media import Table, figure_pixels, image_pixels, make_table
from trainstack.trainer.tracking.writers.group import BackgroundWriter

SAVES: dict[str, Any] = {"checkpointer_args": ts.DefaultCheckpointerArguments()}
RED = np.tile(np.array([255, 0, 0], np.uint8), (2, 4, 1))


class Keeps(ts.Writer):
    """Keeps all calls."""

    def __init__(self, artifacts: Any = "none", *, slow: bool = False) -> None:
        self.artifacts, self.calls = artifacts, list[tuple[Any, ...]]()
        self.threads: set[int] = set()
        self.slow = slow  # type: ignore[misc]

    def write(self, records: Sequence[Record]) -> None:
        """The history has them."""

    def log_image(self, name: str, image: Any, step: int) -> None:
        self.calls.append(("image", name, image.shape, step))

    def log_text(self, name: str, text: str, step: int) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(("text", name, text, step))

    def log_table(self, name: str, table: Table, step: int) -> None:
        self.calls.append(("table", name, table.to_dict(), step))

    def log_artifact(self, name: str, path: Path, kind: str) -> None:
        assert path.exists()
        self.calls.append(("artifact", name, path.name, kind))

    def end(self, status: str, reason: str | None) -> None:
        self.calls.append(("end", status, reason))

    def close(self) -> None:
        self.calls.append(("close",))


class OldWriter(ts.Writer):
    """A writer that supports records only."""

    def __init__(self) -> None:
        self.records, self.closed = 0, 0

    def write(self, records: Sequence[Record]) -> None:
        self.records += len(records)

    def close(self) -> None:
        self.closed += 1


class Logs(Classifier):
    """Logs in each validation; `crash` is raised after step `at`."""

    def __init__(self, crash: BaseException | None = None, at: int = 3) -> None:
        super().__init__(numbers(32), validate=True)
        self.crash, self.at = crash, at

    def on_end_train_step(self, global_step: int) -> None:
        if self.crash is not None and global_step == self.at:
            raise self.crash

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
        self.log_image("val/image", torch.ones(3, 2, 4))
        self.log_text("val/text", f"step {global_step}")
        self.log_table("val/table", [[1, torch.tensor(0.5)]], columns=["a", "b"])


def test_writers_get_the_logged_values_then_the_status(tmp_path: Path) -> None:
    for slow in (False, True):
        keeps = Keeps("last", slow=slow)
        old = OldWriter()
        train(Logs(), tmp_path / str(slow), epochs=2, writers=[keeps, old], **SAVES)
        assert keeps.calls == [
            *(
                call
                for step in (4, 8)
                for call in (
                    ("image", "val/image", (2, 4, 3), step),
                    ("text", "val/text", f"step {step}", step),
                    ("table", "val/table", {"a": [1], "b": [0.5]}, step),
                )
            ),
            ("artifact", "checkpoint", "checkpoint-000000008", "checkpoint"),
            ("artifact", "model", "checkpoint-model-000000008", "model"),
            ("end", "finished", None),
            ("close",),
        ]
        assert (threading.get_ident() in keeps.threads) is not slow
        assert old.records > 0
        assert old.closed == 1


@pytest.mark.distributed
@pytest.mark.processes
def test_the_main_rank_writes_and_reports_failures_of_others(tmp_path: Path) -> None:
    main, other = run_world(2, logged_over_processes, directory=str(tmp_path))
    assert main == [["epoch", "rank 0", 4], ["worker", "file"], ["failed"], ["raised"]]
    assert other == [["raised"]]


def test_the_best_checkpoint_is_uploaded_on_request(tmp_path: Path) -> None:
    keeps = Keeps("best")
    trainer = train(Logs(), tmp_path, epochs=3, writers=[keeps], **SAVES)
    losses = dict(zip((4, 8, 12), trainer.history.get_metric_values("val/loss"), strict=True))
    best = min(losses, key=losses.__getitem__)
    assert [call[2] for call in keeps.calls if call[:2] == ("artifact", "checkpoint")] == [f"checkpoint-{best:09}"]


@pytest.mark.parametrize(
    ("crash", "expected"),
    [
        (RuntimeError("no luck"), ("failed", "RuntimeError: no luck")),
        (KeyboardInterrupt(), ("interrupted", "KeyboardInterrupt")),
        (ts.StopTraining("enough"), ("stopped", "enough")),
    ],
    ids=["failed", "interrupted", "stopped"],
)
def test_writers_get_the_status_of_the_run(tmp_path: Path, crash: BaseException, expected: tuple[str, str]) -> None:
    keeps, old = Keeps("last"), OldWriter()
    trainer = ts.Trainer(Logs(crash, at=5), arguments(tmp_path, epochs=2, writers=[keeps, old], **SAVES))
    if isinstance(crash, ts.StopTraining):
        trainer.train()
    else:
        with pytest.raises(type(crash)):
            trainer.train()
    assert [call[1:] for call in keeps.calls if call[0] == "end"] == [expected]
    uploads = [call[1] for call in keeps.calls if call[0] == "artifact"]
    assert uploads == {"failed": ["checkpoint"], "interrupted": [], "stopped": ["checkpoint", "model"]}[expected[0]]
    assert old.closed == 1


def test_searches_checks_and_separate_validations_write_nothing(tmp_path: Path) -> None:
    keeps = Keeps()
    made = arguments(tmp_path, epochs=1, writers=[keeps], sanity_val_steps=1)
    trainer = ts.Trainer(Logs(), made)
    ts.find_lr(trainer, start=1e-4, end=1e-2, steps=3)
    trainer.train()
    trainer.validate()
    assert [call[3] for call in keeps.calls if call[0] == "text"] == [4]


def test_a_validation_in_a_hook_is_part_of_the_run(tmp_path: Path) -> None:
    keeps = Keeps()
    trainer = ts.Trainer(Logs(), arguments(tmp_path, epochs=1, writers=[keeps]))
    trainer.on(ts.Event.TRAIN_STEP_END, once=2)(lambda trainer: trainer.validate() and None)
    trainer.train()
    assert [call[3] for call in keeps.calls if call[0] == "text"] == [2, 4]


def test_the_trainer_logs_within_training_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeps = Keeps()
    trainer = ts.Trainer(Classifier(), arguments(tmp_path, epochs=1, writers=[keeps]))
    (tmp_path / "notes.txt").write_text("notes")

    @trainer.on(ts.Event.TRAIN_END)
    def log(trainer: ts.Trainer) -> None:
        trainer.log_text("end", "all")
        trainer.log_artifact(tmp_path / "notes.txt")
        with pytest.raises(ts.ConfigurationError, match="no file or folder"):
            trainer.log_artifact(tmp_path / "nowhere")

    trainer.train()
    assert ("text", "end", "all", 6) in keeps.calls
    assert ("artifact", "notes.txt", "notes.txt", "file") in keeps.calls
    for call in (lambda: trainer.log_text("late", "x"), lambda: trainer.log_artifact(tmp_path / "notes.txt")):
        with pytest.raises(ts.ConfigurationError, match="no training is running"):
            call()


def test_values_without_a_writer_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(Logs(), tmp_path, epochs=2, writers=["csv", OldWriter()])
    said = [message for message in caplog.messages if "no writer of this run takes" in message]
    assert [message.split("takes ")[1].split(",")[0] for message in said] == ["images", "texts", "tables"]


class LogsPrivately(Logs):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.log_text("train/text", "of a record")
        return super().train_step(global_step, batch, device)

    def on_end_train_step(self, global_step: int) -> None:
        self.log_text("public", "constant", provenance=ts.Provenance.PUBLIC)


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("shows", [False, True])
def test_a_private_run_writes_only_permitted_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shows: bool
) -> None:
    privacy = ts.DifferentialPrivacyArguments(noise_multiplier=1.0, delta=1e-3, log_train_loss=shows)
    keeps = Keeps()
    given = {"backend": "sp-dp", "differential_privacy_args": privacy, "epochs": 1}
    train(LogsPrivately(), tmp_path, writers=[keeps], **given)
    names = {call[1] for call in keeps.calls if call[0] == "text"}
    assert names == {"val/text", "public"} | ({"train/text"} if shows else set())
    assert any("a private run writes nothing" in message for message in caplog.messages) is not shows


def test_a_module_alone_keeps_its_logged_values(caplog: pytest.LogCaptureFixture) -> None:
    module = Logs()
    module.log("loss", torch.tensor(0.5))
    module.log("loss", 0.25)
    module.log_text("note", "hello")
    assert module.logged == {"loss": 0.25, "note": "hello"}
    assert [message for message in caplog.messages if "no Trainer runs it" in message] == [
        "Logs logs 'loss' and no Trainer runs it: the values are kept in module.logged."
    ]
    with pytest.raises(ts.ConfigurationError, match="give a number"):
        module.log("loss", "high")
    with pytest.raises(ts.ConfigurationError, match="holds a control character"):
        module.log_text("a\nb", "x")


def test_a_module_may_define_an_attribute_logged() -> None:
    module = Logs()
    module.logged = ["mine"]  # type: ignore[assignment]
    module.log("loss", 1.0)
    assert module.logged == ["mine"]


def test_a_metric_object_as_value_is_refused() -> None:
    class Accuracy:
        def compute(self) -> float:
            return 1.0

    with pytest.raises(ts.ConfigurationError, match=r"log\('acc', metric.compute\(\)\)"):
        Logs().log("acc", Accuracy())


def test_run_step_leaves_the_module_unchanged() -> None:
    module = Logs().eval()
    inputs, labels = numbers(4)[:]
    result = run_step(module, (inputs, labels))
    assert result.loss is not None
    assert result.loss.requires_grad is False
    assert torch.isfinite(result.loss)
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert not module.training
    assert module.logged == {}
    assert run_step(module, (inputs, labels), stage=ts.Stage.VAL).loss is None

    class LogsMore(Logs):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.log("step", global_step)
            self.log_image("image", RED)
            return super().train_step(global_step, batch, device)

    logged = run_step(LogsMore(), (inputs, labels), global_step=7).logged
    assert logged["step"] == 7
    assert (logged["image"] == RED).all()

    class Yields(Logs):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            yield super().train_step(global_step, batch, device), None

    with pytest.raises(ts.ConfigurationError, match="run_step has none"):
        run_step(Yields(), (inputs, labels))
    with pytest.raises(ts.ConfigurationError, match="Give an instance of ModuleInterface"):
        run_step(torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]


def test_images_of_all_kinds_become_pixels() -> None:
    pixels = torch.from_numpy(RED)
    for given in (
        RED,
        pixels.permute(2, 0, 1),
        pixels.permute(2, 0, 1).bfloat16() / 255,
        RED / 255.0,
        np.concatenate([RED, RED[..., :1]], axis=2),
    ):
        assert (image_pixels(given) == RED).all()
    assert (image_pixels(torch.full((2, 2), 0.5)) == 128).all()
    assert image_pixels(np.array([[np.nan, 2.0], [-1.0, np.inf]])).tolist()[0] == [[0] * 3, [255] * 3]
    image = pytest.importorskip("PIL.Image")
    assert (image_pixels(image.fromarray(RED)) == RED).all()


@pytest.mark.parametrize("given", [torch.zeros(2, 3, 4, 4), np.zeros((4, 4, 5)), torch.zeros(4), "x.png", RED[:0]])
def test_a_value_other_than_an_image_is_refused(given: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match="log_image was given"):
        image_pixels(given)


def test_a_figure_is_drawn_and_keeps_its_canvas() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([0, 1])
    before = figure.canvas
    drawn = figure_pixels(figure)
    assert drawn.shape == (50, 100, 3)
    assert drawn.min() < 128
    assert figure.canvas is before
    assert (figure_pixels(figure.axes[0]) == drawn).all()
    with pytest.raises(ts.ConfigurationError, match="write log_image"):
        figure_pixels(RED)


def test_tables_of_all_kinds_are_converted() -> None:
    table = Table(("a", "b"), ((1, "x"), (2, None)))
    assert make_table({"a": torch.tensor([1, 2]), "b": ["x", None]}) == table
    assert make_table([{"a": 1, "b": "x"}, {"a": np.int64(2)}]) == table
    assert make_table([(1, "x"), (2, None)], ["a", "b"]) == table
    assert table.to_markdown().splitlines() == ["| a | b |", "| --- | --- |", "| 1 | x |", "| 2 | None |"]
    assert "a&#124;b c" in make_table({"n": ["a|b\nc"]}).to_markdown()
    frame = pytest.importorskip("pandas").DataFrame({"a": [1, 2], "b": ["x", "y"]})
    assert make_table(frame).rows == ((1, "x"), (2, "y"))


@pytest.mark.parametrize(
    ("given", "columns"), [({"a": [1], "b": []}, None), ([[1, 2]], None), ([[1, 2]], ["a"]), ("text", ["a"]), (3, None)]
)
def test_a_value_other_than_a_table_is_refused(given: Any, columns: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match="log_table was given"):
        make_table(given, columns)


def test_an_upload_may_take_longer_than_other_calls() -> None:
    class Uploads(Keeps):
        slow = True

        def log_artifact(self, name: str, path: Path, kind: str) -> None:
            threading.Event().wait(0.5)
            super().log_artifact(name, path, kind)

    uploads = Uploads()
    writer = BackgroundWriter(uploads, patience_s=0.1)
    writer.open(ts.RunInfo())
    writer.log_artifact("model", Path(__file__), "model")
    writer.close()
    assert [call[0] for call in uploads.calls] == ["artifact", "close"]
