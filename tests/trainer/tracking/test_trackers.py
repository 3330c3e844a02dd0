"""The calls that writers make to tracking services; fakes replace their packages."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, train
from tools.clients.__main__ import LIMIT_S, SCRIPTS, TRACKERS, run
from trainstack.checkpointing import filesystem
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.writers import MlflowWriter, RunInfo, TrackioWriter, WandbWriter, Writer
from trainstack.trainer.tracking.writers.group import BackgroundWriter

CONFIG = {"backend": "sp", "arguments": {"epochs": 2, "writers": ["x"], "checkpointer_args": {"keep": 3}}, "plan": {}}


def put(writer: Writer, directory: Path, records: list[Record], resume_step: int | None = None) -> str:
    """Write `records` as one process does; returns the id of the run."""
    writer.open(RunInfo(resume_step=resume_step, log_dir=directory, config=CONFIG))
    writer.write(records)
    writer.close()
    writer.close()
    (file,) = directory.glob("*-run.json")
    return str(json.loads(file.read_text())["run"])


FIRST = [Record("train/loss", 0.5, 10, 0), Record("lr", 0.1, 10, 0), Record("train/loss", 0.25, 20, 1)]
SECOND = [Record("train/loss", 0.125, 30, 1)]


def package(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A stand-in for the package `name`, which `import` and `find_spec` find."""
    module = ModuleType(name)
    vars(module).update(contents)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="stand-in")
    monkeypatch.setitem(sys.modules, name, module)


class Calls:
    """A run of a fake: keeps its arguments."""

    def __init__(self, name: str, /, **options: Any) -> None:
        self.id = self.name = name
        self.options, self.logged, self.metrics, self.finished = options, [], [], 0
        self.exit_code: int | None = None
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, values))

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def mark_preempting(self) -> None:
        self.summary["preempting"] = True

    def finish(self, exit_code: int | None = None) -> None:
        self.finished += 1
        self.exit_code = exit_code


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[Calls]:
    runs: list[Calls] = []

    def init(**options: Any) -> Calls:
        runs.append(Calls(options.get("id", f"made-{len(runs)}"), **options))
        return runs[-1]

    package(monkeypatch, "wandb", init=init)
    return runs


def test_wandb_gets_one_point_a_step_and_resumes_its_run(wandb_runs: list[Calls], tmp_path: Path) -> None:
    assert put(WandbWriter(project="mine", mode="offline"), tmp_path, FIRST) == "made-0"
    assert put(WandbWriter(project="mine"), tmp_path, SECOND, resume_step=20) == "made-0"
    assert put(WandbWriter(), tmp_path, FIRST) == "made-2"  # a fresh run is another run

    first, resumed, _ = wandb_runs
    assert first.options["config"] == CONFIG
    assert (first.options["project"], first.options["mode"], first.finished) == ("mine", "offline", 1)
    assert "resume" not in first.options
    assert (resumed.options["id"], resumed.options["resume"]) == ("made-0", "allow")
    assert first.metrics == [("global_step", None), ("*", "global_step")]
    assert [values for _, values in first.logged] == [
        {"global_step": 10, "epoch": 0, "train/loss": 0.5, "lr": 0.1},
        {"global_step": 20, "epoch": 1, "train/loss": 0.25},
    ]


def test_trackio_gets_one_point_a_step_and_resumes_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[Calls] = []

    def init(project: str, **options: Any) -> Calls:
        runs.append(Calls(options.get("name", f"{project}-{len(runs)}"), **options))
        return runs[-1]

    package(monkeypatch, "trackio", init=init)
    assert put(TrackioWriter("mine", group="g"), tmp_path, FIRST) == "mine-0"
    assert put(TrackioWriter("mine"), tmp_path, SECOND, resume_step=20) == "mine-0"

    first, resumed = runs
    assert (first.options["group"], first.options["config"], first.finished) == ("g", CONFIG, 1)
    assert (resumed.options["name"], resumed.options["resume"]) == ("mine-0", "must")
    assert first.logged == [
        (10, {"epoch": 0, "train/loss": 0.5, "lr": 0.1}),
        (20, {"epoch": 1, "train/loss": 0.25}),
    ]


class MlflowServer:
    """A stand-in for an MLflow server and its client."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}

    def client(self, uri: str | None = None) -> MlflowServer:
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment_id: str, run_name: str | None) -> Any:
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = {"params": {}, "metrics": [], "tags": {}, "status": "RUNNING", "calls": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params=self.runs[run_id]["params"]))

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.runs[run_id]["tags"][key] = value

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        run = self.runs[run_id]
        run["calls"].append((len(metrics), len(params)))
        run["params"].update({param.key: param.value for param in params})
        run["metrics"] += [(metric.key, metric.value, metric.step) for metric in metrics]

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status


@pytest.fixture
def mlflow_server(monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    server = MlflowServer()
    package(monkeypatch, "mlflow", MlflowClient=server.client, active_run=lambda: None)
    package(
        monkeypatch,
        "mlflow.entities",
        Param=lambda key, value: SimpleNamespace(key=key, value=value),
        Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step),
    )
    return server


def test_mlflow_gets_all_records_and_arguments_and_resumes_its_run(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    assert put(MlflowWriter(experiment="mine"), tmp_path, FIRST) == "run-0"
    assert put(MlflowWriter(experiment="mine"), tmp_path, SECOND, resume_step=20) == "run-0"
    assert put(MlflowWriter(experiment="mine"), tmp_path, FIRST) == "run-1"

    run = mlflow_server.runs["run-0"]
    assert list(mlflow_server.experiments) == ["mine"]
    assert (run["params"]["arguments.epochs"], run["params"]["arguments.checkpointer_args.keep"]) == ("2", "3")
    assert run["metrics"] == [(name, value, step) for name, value, step, _ in [*FIRST, *SECOND]]
    assert run["status"] == "FINISHED"


def test_mlflow_gets_valid_names_in_batches_of_1000(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    put(MlflowWriter(), tmp_path, [Record("loss(é)", 1.0, step, 0) for step in range(2500)])
    run = mlflow_server.runs["run-0"]
    assert [metrics for metrics, _ in run["calls"] if metrics] == [1000, 1000, 500]
    assert {name for name, _, _ in run["metrics"]} == {"loss___"}


def test_the_error_for_a_lost_run_names_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise LookupError("no such run")

    package(monkeypatch, "trackio", init=refuse)
    (tmp_path / "trackio-run.json").write_text('{"run": "gone"}')
    with pytest.raises(LookupError) as caught:
        put(TrackioWriter(), tmp_path, [], resume_step=1)
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    assert note.startswith("this would have continued run 'gone'; delete ")


@pytest.mark.parametrize("content", ["", '{"run": "ma', "[]", "{}", '{"run": null}', "\udcff"])
def test_a_damaged_run_file_starts_a_new_run(
    wandb_runs: list[Calls], tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    file = tmp_path / "wandb-run.json"
    file.write_text(content, errors="surrogateescape")
    assert put(WandbWriter(), tmp_path, FIRST, resume_step=1) == "made-0"
    assert caplog.messages == [f"{file} does not say which run to continue: a new run begins there."]
    assert put(WandbWriter(), tmp_path, SECOND, resume_step=20) == "made-0"
    assert wandb_runs[1].options["resume"] == "allow"


def test_the_run_file_is_replaced_atomically(
    wandb_runs: list[Calls], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(WandbWriter(), tmp_path, FIRST)

    def full(handle: Any, data: bytes) -> None:
        handle.write(data[:3])
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(filesystem, "write", full)
        with pytest.raises(ts.CheckpointError, match="no space left"):
            put(WandbWriter(), tmp_path, SECOND, resume_step=20)
    assert put(WandbWriter(), tmp_path, SECOND, resume_step=20) == "made-0"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "comet", "clearml", "aim", "dvclive", "prometheus"])
def test_a_package_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *more: None if n.startswith(name) else find(n, *more))
    with pytest.raises(ts.MissingExtraError, match=rf"pip install 'trainstack\[{name}\]"):
        train(Classifier(), tmp_path, writers=[name])


def test_wandb_gets_the_arguments_of_a_training(wandb_runs: list[Calls], tmp_path: Path) -> None:
    train(Classifier(), tmp_path, epochs=1, log_every=2, writers=["wandb"])
    (run,) = wandb_runs
    assert run.options["config"]["arguments"]["log_every"] == 2
    assert run.options["config"]["plan"]["epochs"] == 1
    assert [values["global_step"] for _, values in run.logged if "train/loss" in values] == [2, 4, 6]
    assert run.finished == 1


def end(writer: Writer, directory: Path, status: str, reason: str | None = None) -> None:
    writer.open(RunInfo(log_dir=directory, config=CONFIG))
    writer.end(status, reason)
    writer.close()


STATUSES = [
    ("finished", "FINISHED", 0),
    ("stopped", "FINISHED", 0),
    ("interrupted", "KILLED", 1),
    ("failed", "FAILED", 1),
]


@pytest.mark.parametrize(("status", "state", "code"), STATUSES)
def test_a_run_ends_with_its_status(
    wandb_runs: list[Calls], mlflow_server: MlflowServer, tmp_path: Path, status: str, state: str, code: int
) -> None:
    reason = "why" if code else None
    end(WandbWriter(), tmp_path, status, reason)
    assert wandb_runs[0].exit_code == code
    assert wandb_runs[0].summary.get("trainstack_reason") == reason
    assert ("preempting" in wandb_runs[0].summary) is (status == "interrupted")
    end(MlflowWriter(), tmp_path, status, reason)
    assert mlflow_server.runs["run-0"]["status"] == state
    assert mlflow_server.runs["run-0"]["tags"].get("trainstack.reason") == reason


def test_a_crashed_training_is_failed_in_mlflow(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    class Crashes(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        train(Crashes(), tmp_path, writers=["mlflow"])
    assert mlflow_server.runs["run-0"]["status"] == "FAILED"


def test_mlflow_names_stay_unique_after_replacement_of_characters(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    writer = MlflowWriter()
    writer.open(RunInfo(log_dir=tmp_path, config={"\u03b1": 1, "\u03b2": 2}))
    for step in (1, 2):
        writer.write([Record("loss/\u03b1", 0.5, step, 0), Record("loss/\u03b2", 0.25, step, 0)])
    writer.close()
    run = mlflow_server.runs["run-0"]
    assert [(name, value) for name, value, _ in run["metrics"]] == [("loss/_", 0.5), ("loss/__2", 0.25)] * 2
    assert run["params"] == {"_": "1", "__2": "2"}


def test_a_run_whose_tracker_failed_has_status_failed(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    writer = BackgroundWriter(MlflowWriter())
    writer.open(RunInfo(log_dir=tmp_path, config=CONFIG))
    mlflow_server.log_batch = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
    writer.write(FIRST)
    with pytest.raises(ZeroDivisionError):
        writer.close()
    run = mlflow_server.runs["run-0"]
    assert run["status"] == "FAILED"
    assert run["tags"]["trainstack.reason"] == "logging failed: ZeroDivisionError: division by zero"


class OpenRun(Calls):
    """A run that the user has opened, whose config takes updates."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.config = SimpleNamespace(values={}, update=self.update)  # type: ignore[assignment]

    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:
        assert allow_val_change
        self.config.values.update(values)  # type: ignore[attr-defined]


def test_the_open_run_of_wandb_is_used_and_left_open(
    wandb_runs: list[Calls], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = sys.modules["wandb"].run = OpenRun("sweep")  # type: ignore[attr-defined]
    assert put(WandbWriter(project="mine"), tmp_path, FIRST) == "sweep"
    assert (len(sweep.logged), sweep.finished) == (2, 0)
    assert sweep.config.values["arguments"] == CONFIG["arguments"]  # type: ignore[attr-defined]
    assert "project of the writer have no effect" in caplog.text
    assert put(WandbWriter(), tmp_path, SECOND, resume_step=20) == "sweep"
    assert wandb_runs == []
    assert put(WandbWriter(own_run=True), tmp_path / "own", FIRST) == "made-0"
    assert wandb_runs[0].finished == 1

    sys.modules["wandb"].run = OpenRun("another")  # type: ignore[attr-defined]
    with pytest.raises(ts.ConfigurationError, match="'sweep', and the run 'another' is open"):
        put(WandbWriter(), tmp_path, SECOND, resume_step=20)


def test_the_active_run_of_mlflow_keeps_its_parameters(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    run_id = mlflow_server.create_run("0", None).info.run_id
    mlflow_server.runs[run_id]["params"]["backend"] = "mine"
    active = SimpleNamespace(info=SimpleNamespace(run_id=run_id))
    sys.modules["mlflow"].active_run = lambda: active  # type: ignore[attr-defined]
    assert put(MlflowWriter(), tmp_path, FIRST) == run_id
    run = mlflow_server.runs[run_id]
    assert (run["status"], len(run["metrics"])) == ("RUNNING", 3)
    assert (run["params"]["backend"], run["params"]["arguments.epochs"]) == ("mine", "2")
    assert put(MlflowWriter(own_run=True), tmp_path / "own", FIRST) == "run-1"
    assert put(MlflowWriter(experiment="mine"), tmp_path / "named", FIRST) == "run-2"


def test_wrong_artifacts_are_refused(wandb_runs: list[Calls]) -> None:
    with pytest.raises(ts.ConfigurationError, match="write 'last', 'best' or 'none'"):
        WandbWriter(artifacts="all")  # type: ignore[arg-type]


def test_the_readers_of_tensorboard_find_all_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tools.clients.trackers import use_tensorboard

    use_tensorboard.main(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRACKERS if name != "tensorboard"])
def test_scripts_with_the_real_packages_pass(name: str) -> None:
    if importlib.util.find_spec(TRACKERS[name]) is None:  # the scripts run in a process each
        pytest.skip(f"needs {TRACKERS[name]}")
    result, output = run(SCRIPTS / "trackers" / f"use_{name}.py", sys.executable, LIMIT_S)
    assert result == "passed", output
