"""The folder of a run: how it is chosen, and that a new run never replaces the files of another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers import launched
from tests.helpers.modules import Classifier, numbers
from tests.helpers.processes import run_world
from tests.helpers.scripts import run_python
from trainstack.checkpointing import Lease
from trainstack.checkpointing.directory import list_checkpoints
from trainstack.trainer import run_directory, run_record
from trainstack.trainer.callbacks import BestCheckpoint
from trainstack.trainer.run_record import FILE_NAME, RunRecord, read_record

NOTHING: dict[str, Any] = {"writers": [], "checkpointer_args": ts.DefaultCheckpointerArguments(checkpoint=False)}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin_another_process()


def begin_another_process() -> None:
    """Remove state that a new process does not have."""
    run_directory._finished.clear()


def make(**changes: Any) -> ts.Trainer:
    given = {"train_batch_size": 8, "log_every": 1, "progress": "none", "writers": ["csv", "jsonl"]}
    return ts.Trainer(Classifier(numbers(16)), ts.TrainerArguments(**{**given, **changes}))


def trained(**changes: Any) -> ts.Trainer:
    trainer = make(**changes)
    trainer.train()
    return trainer


def contents(folder: Path) -> dict[str, bytes]:
    """The files in `folder` without the lease, whose number increases at each start."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".lease-" not in path.name]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def stop_at(step: int, **changes: Any) -> ts.Trainer:
    """A training that ends by an exception in this step. As after a kill, no checkpoint of the step exists."""
    trainer = make(**changes)

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def end(_: ts.Trainer, done: int) -> None:
        if trainer.state.global_step == step:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer.train()
    return trainer


# --- the default: a folder for each run


def test_each_run_has_a_separate_folder() -> None:
    first = trained()
    before = contents(first.output_dir)
    second = trained()

    assert first.output_dir != second.output_dir
    assert first.output_dir.parent == second.output_dir.parent == Path.cwd() / "runs"
    assert "Classifier" in first.output_dir.name
    assert contents(first.output_dir) == before


def test_the_plan_shows_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trained(writers=["stdout", "csv"])

    assert f"runs/{trainer.output_dir.name}" in capsys.readouterr().out


def test_a_call_without_output_creates_no_folder() -> None:
    make(**NOTHING).train()
    samples = DataLoader(numbers(16), batch_size=4)
    trainer = ts.Trainer(Classifier(numbers(16), validate=True), make().args)
    trainer.validate(samples)

    assert trainer.output_dir.parent == Path.cwd() / "runs"
    assert list(Path.cwd().iterdir()) == []


def test_auto_continues_the_newest_unfinished_run() -> None:
    unfinished = stop_at(3, epochs=2)
    whole = trained(epochs=2)
    begin_another_process()
    again = trained(epochs=2, resume="auto")

    assert again.output_dir == unfinished.output_dir != whole.output_dir
    assert (again.output_dir / "metrics.csv").read_bytes() == (whole.output_dir / "metrics.csv").read_bytes()
    begin_another_process()
    new = make(epochs=2, resume="auto")
    assert new.output_dir not in (unfinished.output_dir, whole.output_dir)


def test_auto_ignores_runs_of_another_script_or_module(monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = stop_at(3, epochs=2)

    class Other(Classifier):
        """The same class with another name."""

    other = ts.Trainer(Other(numbers(16)), make(resume="auto").args)
    assert other.output_dir != unfinished.output_dir
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/elsewhere/script.py", raising=False)
    assert make(resume="auto").output_dir != unfinished.output_dir


def test_auto_ignores_a_run_with_a_damaged_record() -> None:
    unfinished = stop_at(3, epochs=2)
    file = unfinished.output_dir / FILE_NAME
    data = file.read_bytes()
    for place in range(0, len(data), 7):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert read_record(unfinished.output_dir) is None
    assert make(resume="auto").output_dir != unfinished.output_dir
    file.write_bytes(data)
    assert make(resume="auto").output_dir == unfinished.output_dir


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"record_xxh3_128": 1}', "null", "1e999"])
def test_a_file_without_a_valid_record_is_not_read(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)

    assert read_record(tmp_path) is None


def test_auto_ignores_a_run_that_is_training() -> None:
    unfinished = stop_at(3, epochs=2)
    lease = Lease.acquire([unfinished.output_dir])
    assert make(resume="auto").output_dir != unfinished.output_dir
    lease.release()
    assert make(resume="auto").output_dir == unfinished.output_dir


@pytest.mark.parametrize("ending", ["_backup", ".bak"])
def test_auto_ignores_a_copy_of_a_run(ending: str, caplog: pytest.LogCaptureFixture) -> None:
    unfinished = stop_at(3, epochs=2)
    copy = unfinished.output_dir.with_name(unfinished.output_dir.name + ending)
    shutil.copytree(unfinished.output_dir, copy)
    begin_another_process()

    assert make(epochs=2, resume="auto").output_dir == unfinished.output_dir
    assert any(copy.name in record.message and "ignored" in record.message for record in caplog.records)
    again = trained(epochs=2, resume=str(copy))  # an explicit path makes the copy a run
    assert again.output_dir == copy
    record = read_record(copy)
    assert record is not None
    assert record.folder == copy.name


def test_auto_does_not_wait_for_a_held_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = stop_at(3, epochs=2)
    other = Lease.acquire([unfinished.output_dir], beat_s=0.1)
    monkeypatch.setattr(run_directory, "is_held_here", lambda _: False)  # the other process acquires it after the check
    begin_another_process()
    second = trained(epochs=2, resume="auto")
    with pytest.raises(ts.LeaseError):
        make(epochs=2, resume=str(unfinished.output_dir)).train()
    other.release()

    assert second.output_dir != unfinished.output_dir
    assert second.output_dir.parent == unfinished.output_dir.parent


def test_auto_compares_command_line_arguments_except_resume_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.5"])
    unfinished = stop_at(3, epochs=2)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.001"])
    assert make(resume="auto").output_dir != unfinished.output_dir
    for resuming in (
        ["--resume", "auto"],
        ["--resume"],
        ["--resume=auto"],
        ["--overwrite", "false", "--resume", "true"],
    ):
        monkeypatch.setattr(sys, "argv", ["train.py", *resuming, "--lr", "0.5"])
        assert make(resume="auto").output_dir == unfinished.output_dir
        monkeypatch.setattr(sys, "argv", ["train.py", *resuming, "--lr", "1"])
        assert make(resume="auto").output_dir != unfinished.output_dir


def test_auto_distinguishes_sessions_without_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    unfinished = stop_at(3, epochs=2)
    assert make(resume="auto").output_dir == unfinished.output_dir
    monkeypatch.setattr(run_record, "_SESSION", "another process")
    assert make(resume="auto").output_dir != unfinished.output_dir
    monkeypatch.setenv("JPY_SESSION_NAME", "notebook.ipynb")
    assert make(resume="auto").output_dir != unfinished.output_dir


def test_auto_does_not_repeat_finished_folds() -> None:
    first = trained()
    broken = stop_at(3, epochs=2)
    begin_another_process()

    again, next_one = trained(resume="auto"), trained(resume="auto", epochs=2)

    assert (again.output_dir, next_one.output_dir) == (first.output_dir, broken.output_dir)
    assert next_one.state.global_step == 4
    begin_another_process()
    assert make(resume="auto").output_dir != first.output_dir


@pytest.mark.parametrize(
    ("mode", "resume"),
    [
        *(("weights", resume) for resume in (True, "auto", "best")),
        ("weights_and_optimizer", "auto"),
        *(pytest.param("weights_and_optimizer", resume, marks=pytest.mark.long) for resume in (True, "best")),
    ],
)
def test_a_weights_resume_starts_a_new_folder(resume: Any, mode: Any) -> None:
    saving = ts.DefaultCheckpointerArguments(monitor="train/loss_epoch")
    unfinished = stop_at(3, epochs=2, checkpointer_args=saving)
    before = contents(unfinished.output_dir)

    new = trained(resume=resume, resume_mode=mode, checkpointer_args=saving)

    assert new.output_dir != unfinished.output_dir
    assert contents(unfinished.output_dir) == before
    assert new.state.global_step == 2
    with pytest.raises(ts.ConfigurationError, match="holds a run already"):
        trained(resume=resume, resume_mode=mode, output_dir=unfinished.output_dir, checkpointer_args=saving)
    assert contents(unfinished.output_dir).keys() >= before.keys()


def test_a_broken_link_named_as_a_lease_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lease-000000099.json").symlink_to("nowhere")

    trained(output_dir="run", lease_timeout_s=0.5)  # after this time the lease counts as one of a dead process


@pytest.mark.parametrize("resume", [True, "last", "best"])
def test_resume_continues_the_newest_run_even_if_finished(resume: Any) -> None:
    finished = trained()
    saving = ts.DefaultCheckpointerArguments(monitor="train/loss_epoch")
    longer = trained(epochs=2, resume=resume, checkpointer_args=saving)

    assert longer.output_dir == finished.output_dir
    assert longer.state.global_step == 4


def test_a_resume_without_a_run_suggests_auto() -> None:
    with pytest.raises(ts.CheckpointNotFoundError, match="resume='auto' to start a new run"):
        make(resume=True).train()


def test_a_path_continues_in_the_folder_of_its_run() -> None:
    finished = trained()
    for path in (
        finished.output_dir,
        finished.output_dir / "checkpoints",
        finished.output_dir / "checkpoints" / "last",
    ):
        assert make(epochs=2, resume=str(path)).output_dir == finished.output_dir
    assert make(resume=str(finished.output_dir), resume_mode="weights").output_dir != finished.output_dir


def test_a_new_run_logs_an_unfinished_one(caplog: pytest.LogCaptureFixture) -> None:
    unfinished = stop_at(3, epochs=2)
    caplog.clear()
    trained(epochs=2)

    (line,) = [record.message for record in caplog.records if "not finished" in record.message]
    assert f"runs/{unfinished.output_dir.name}" in line
    assert "resume='auto'" in line


def test_runs_of_one_process_do_not_continue_each_other() -> None:
    finished = trained()
    unfinished = stop_at(1)
    record = read_record(unfinished.output_dir)
    assert record is not None
    replace(record, number=record.number + 5).write(
        unfinished.output_dir
    )  # as of a later trainer in a script that was killed

    assert make(resume="auto").output_dir not in (finished.output_dir, unfinished.output_dir)


def test_two_simultaneous_runs_have_separate_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(), make()
    assert first.output_dir != second.output_dir
    second._context.directory.settle(first.output_dir)  # as if both had the same random name
    first.train()
    with pytest.raises(ts.ConfigurationError, match="holds a run already"):
        second.train()


# --- a folder that is given


@pytest.mark.parametrize("left", [FILE_NAME, "metrics.csv", "report.html", "checkpoints/checkpoint-000000002"])
def test_a_folder_with_remains_of_a_run_is_refused(left: str) -> None:
    trained(output_dir="kept")
    for path in [Path("kept", name) for name in contents(Path("kept"))]:
        if not str(path.relative_to("kept")).startswith(left):
            path.unlink()
    if not left.startswith("checkpoints"):
        shutil.rmtree("kept/checkpoints")
    before = contents(Path("kept"))

    with pytest.raises(ts.ConfigurationError, match="output_dir='kept' holds a") as caught:
        make(output_dir="kept").train()
    assert contents(Path("kept")) == before
    for way in ("output_dir='kept-2'", "overwrite=True"):
        assert way in str(caught.value)
    can_continue = left.startswith("checkpoints")
    assert ("resume='auto'" in str(caught.value)) == can_continue
    if can_continue:
        trained(output_dir="kept", resume="auto")
    else:
        with pytest.raises(ts.ConfigurationError, match="output_dir='kept' holds a"):
            make(output_dir="kept", resume="auto").train()
    trained(output_dir="kept", overwrite=True)


@pytest.mark.parametrize("place", [{}, {"checkpointer_args": ts.DefaultCheckpointerArguments(save_dir="elsewhere")}])
def test_a_start_that_was_refused_before_its_first_step_leaves_the_folder_free(place: dict[str, Any]) -> None:
    class Yields(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            yield super().train_step(global_step, batch, device)

    args = ts.TrainerArguments(train_batch_size=8, output_dir="kept", verify_replay=0.5, progress="none", **place)
    with pytest.raises(ts.ConfigurationError, match="verify_replay"):
        ts.Trainer(Yields(numbers(16)), args).train()
    assert Path("kept", FILE_NAME).exists()
    ts.Trainer(Yields(numbers(16)), replace(args, verify_replay=0.0)).train()
    ts.Trainer(Yields(numbers(16)), replace(args, verify_replay=0.0, output_dir="whole")).train()
    assert contents(Path("kept"))["metrics.csv"] == contents(Path("whole"))["metrics.csv"]
    with pytest.raises(ts.ConfigurationError, match="holds a run already"):
        ts.Trainer(Yields(numbers(16)), replace(args, verify_replay=0.0)).train()


def test_a_foreign_metrics_file_is_not_replaced() -> None:
    Path("mine").mkdir()
    Path("mine", "metrics.csv").write_text("a,b\n1,2\n")

    with pytest.raises(ts.ConfigurationError, match=r"a file that a run would replace .*delete metrics\.csv, even if"):
        make(output_dir="mine").train()
    assert Path("mine", "metrics.csv").read_text() == "a,b\n1,2\n"


def test_unrelated_files_do_not_count_as_a_run() -> None:
    Path("mine").mkdir()
    Path("mine", "notes.txt").write_text("mine")
    trained(output_dir="mine")

    assert Path("mine", "metrics.csv").exists()


def test_overwrite_deletes_only_the_files_of_the_run() -> None:
    trained(output_dir="kept", epochs=3, writers=["csv", "jsonl", "tensorboard"])
    strangers = ["notes.txt", "metrics.old.csv", "tensorboard/events.out.tfevents.1.host.2", "checkpoints/notes.txt"]
    strangers += ["privacy-ledger.jsonl", "checkpoints/mine-000000007/model.bin"]
    for name in strangers:
        Path("kept", name).parent.mkdir(parents=True, exist_ok=True)
        Path("kept", name).write_text("mine")
    new = trained(output_dir="kept", overwrite=True)
    fresh = trained(output_dir="fresh")

    assert {name: Path("kept", name).read_text() for name in strangers} == dict.fromkeys(strangers, "mine")
    ours = set(contents(Path("kept"))) - set(strangers)
    assert ours == set(contents(Path("fresh")))
    assert (new.output_dir / "metrics.csv").read_bytes() == (fresh.output_dir / "metrics.csv").read_bytes()


def test_overwrite_keeps_a_foreign_folder_named_best() -> None:
    for name, is_own in (("first", True), ("second", False)):
        args = make(output_dir=name, epochs=2).args
        ts.Trainer(Classifier(numbers(16)), args, callbacks=[BestCheckpoint("train/loss")] if is_own else []).train()
    ts.export_model(Classifier(numbers(16)), "second/best")
    for name in ("first", "second"):
        Path(name, "best", "thesis.tex").write_text("mine")
        trained(output_dir=name, overwrite=True)
    assert not Path("first/best").exists()
    assert Path("second/best/thesis.tex").exists()


def test_overwrite_of_an_empty_folder_starts_a_run() -> None:
    trained(output_dir="new", overwrite=True)

    assert read_record(Path("new")) is not None


@pytest.mark.parametrize("resume", [True, "auto", "last", "best", "kept"])
def test_overwrite_together_with_resume_is_refused(resume: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match="Write one of them"):
        make(output_dir="kept", overwrite=True, resume=resume)


@pytest.mark.parametrize("name", ["overwrite", "private_files"])
def test_values_other_than_booleans_are_refused(name: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=f"{name}='yes'"):
        make(**{name: "yes"})


def test_evaluation_in_the_folder_of_a_run_is_allowed() -> None:
    trained(output_dir="kept")
    before = contents(Path("kept"))
    make(output_dir="kept").validate()

    assert contents(Path("kept")) == before


def test_a_run_cannot_replace_a_third_run() -> None:
    trained(output_dir="source")
    trained(output_dir="kept")

    with pytest.raises(ts.ConfigurationError, match="holds a run already"):
        make(output_dir="kept", resume="source", epochs=2).train()
    with pytest.raises(ts.ConfigurationError, match="holds a run already"):
        make(output_dir="kept", resume="kept", resume_mode="weights").train()


# --- kills before the first checkpoint


@pytest.mark.parametrize("place", [{}, {"output_dir": "kept"}])
def test_a_restart_before_the_first_checkpoint_replaces_the_logs(place: dict[str, Any]) -> None:
    changes = {"writers": ["csv", "jsonl", "tensorboard"], "resume": "auto", **place}
    killed = stop_at(1, **changes)
    stop_at(1, **changes)
    again = trained(**changes)
    whole = trained(output_dir="whole", writers=["csv", "jsonl", "tensorboard"])

    assert again.output_dir == killed.output_dir
    names = {name.split(".tfevents.")[0] for name in contents(again.output_dir)}
    assert names == {name.split(".tfevents.")[0] for name in contents(whole.output_dir)}
    assert len(json.loads((again.output_dir / "run.json").read_text())["sessions"]) == 1


@pytest.mark.parametrize("place", [{}, {"output_dir": "kept"}, {"checkpointer_args": "elsewhere"}])
def test_a_run_with_missing_checkpoints_does_not_restart(place: dict[str, Any]) -> None:
    if "checkpointer_args" in place:  # such as on a disk that is not mounted
        place = {"output_dir": "kept", "checkpointer_args": ts.DefaultCheckpointerArguments(save_dir="elsewhere")}
    killed = stop_at(3, epochs=2, resume="auto", **place)
    checkpoints = Path("elsewhere") if "checkpointer_args" in place else killed.output_dir / "checkpoints"
    before = contents(killed.output_dir)
    checkpoints.rename("away")
    for _ in range(2):
        begin_another_process()
        with pytest.raises(ts.CheckpointNotFoundError, match="A start at step 0 would delete the logs") as caught:
            make(epochs=2, resume="auto", **place).train()
        assert ("checkpoints has none" if checkpoints.name == "checkpoints" else "elsewhere has none") in str(
            caught.value
        )
    checkpoints.mkdir(exist_ok=True)
    after = contents(killed.output_dir)
    assert {name: data for name, data in after.items() if name in before} == {
        name: data for name, data in before.items() if not name.startswith("checkpoints/")
    }
    for path in Path("away").iterdir():
        path.rename(checkpoints / path.name)
    again = trained(epochs=2, resume="auto", **place)
    assert again.output_dir == killed.output_dir


def test_a_run_continues_from_moved_checkpoints() -> None:
    stop_at(3, epochs=2, resume="auto", output_dir="kept")
    Path("kept/checkpoints").rename("away")
    begin_another_process()
    saving = ts.DefaultCheckpointerArguments(save_dir="away")

    again = trained(epochs=2, resume="auto", output_dir="kept", checkpointer_args=saving)
    assert again.global_steps_finished == 4


@pytest.mark.parametrize("in_background", [False, True])
def test_the_record_has_whether_a_checkpoint_was_saved(in_background: bool) -> None:
    saving = ts.DefaultCheckpointerArguments(async_save=in_background)
    record = read_record(stop_at(1, output_dir="first", epochs=2, checkpointer_args=saving).output_dir)
    assert record is not None
    assert not record.saved
    record = read_record(stop_at(4, output_dir="second", epochs=2, checkpointer_args=saving).output_dir)
    assert record is not None
    assert record.saved
    trainer = make(output_dir="third", checkpointer_args=saving)
    trainer.save_checkpoint(force=True)  # outside of train()
    record = read_record(trainer.output_dir)
    assert record is not None
    assert record.saved
    assert record.run_id == trainer.checkpointer.run_id  # type: ignore[attr-defined]


def test_a_custom_checkpointer_without_result_does_not_restart() -> None:
    class Forgets(ts.AbstractCheckpointer):
        def load(self, *_: Any) -> ts.Checkpoint:
            return ts.Checkpoint()

        def save(self, *_: Any, **__: Any) -> None:
            pass

        def save_model(self, *_: Any, **__: Any) -> None:
            pass

    def start(step: int) -> None:
        trainer = ts.Trainer(Classifier(numbers(16)), make(output_dir="kept", resume="auto").args, "sp", Forgets())
        trainer.on(ts.Event.TRAIN_STEP_END)(lambda trainer, _: 1 / (step - trainer.state.global_step) and None)
        trainer.save_checkpoint(force=True)
        trainer.train()

    with pytest.raises(ZeroDivisionError):
        start(1)
    with pytest.raises(ts.CheckpointNotFoundError, match="the checkpointer finds none"):
        start(1)


def test_a_different_record_is_not_an_earlier_start() -> None:
    killed = stop_at(1, output_dir="kept", resume="auto")
    record = read_record(killed.output_dir)
    assert record is not None
    for other in (replace(record, module="other.py:Other"), replace(record, finished=True)):
        other.write(killed.output_dir)
        with pytest.raises(ts.ConfigurationError, match="holds a run already"):
            make(output_dir="kept", resume="auto").train()


# --- paths


def test_paths_are_resolved_when_the_trainer_is_made(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for place in ({}, {"output_dir": "kept"}):
        trainer = make(**place)

        @trainer.on(ts.Event.TRAIN_BEGIN)
        def move(_: ts.Trainer) -> None:
            os.chdir(tmp_path / "elsewhere")

        trainer.train()
        os.chdir(tmp_path)
        assert trainer.output_dir.is_absolute()
        assert {"metrics.csv", "report.html", "run.json", FILE_NAME, "checkpoints"} <= {
            path.name for path in trainer.output_dir.iterdir()
        }
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_change_of_directory_moves_no_output(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    trainer = make(output_dir="kept")
    os.chdir(tmp_path / "elsewhere")
    trainer.train()

    assert list_checkpoints(tmp_path / "kept" / "checkpoints")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_deleted_current_folder_affects_relative_paths_only(tmp_path: Path) -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    (tmp_path / "gone").rmdir()
    for changes in ({}, {"output_dir": "kept"}):
        with pytest.raises(ts.ConfigurationError, match="the current folder does not exist any more"):
            make(**changes)
    assert trained(output_dir=str(tmp_path / "kept")).output_dir == tmp_path / "kept"


def test_the_record_names_the_module() -> None:
    record = read_record(trained().output_dir)

    assert record is not None
    assert record.finished
    assert record.module.endswith("helpers/modules.py:Classifier")
    assert isinstance(record, RunRecord)
    assert record.order == 1


def test_a_dev_run_writes_no_files() -> None:
    trained(output_dir="kept")
    before = contents(Path("kept"))
    trained(output_dir="kept", fast_dev_run=True)
    trained(fast_dev_run=True)

    assert contents(Path("kept")) == before
    assert not Path("runs").exists()


# --- Ctrl-C in a script

SCRIPT = """
import os, signal, sys
import trainstack as ts
from tests.helpers.modules import Classifier, numbers

args = ts.TrainerArguments(train_batch_size=8, epochs=4, progress="none", writers=["csv"], resume=RESUME)
trainer = ts.Trainer(Classifier(numbers(16)), args)

@trainer.on(ts.Event.TRAIN_STEP_END)
def press(trainer, step):
    if trainer.state.global_step == 3 and not os.environ.get("QUIET"):
        os.kill(os.getpid(), signal.SIGINT)

trainer.train()
print("through")
"""


def run_script(resume: str, *, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    Path("train.py").write_text(SCRIPT.replace("RESUME", resume))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **({"QUIET": "1"} if quiet else {})}
    return run_python("train.py", env=environ)


@pytest.mark.processes
def test_an_interrupted_script_prints_one_sentence_and_can_continue() -> None:
    pressed = run_script("False")
    (folder,) = Path("runs").iterdir()
    assert pressed.returncode == -2
    assert "Traceback" not in pressed.stderr
    said = [line for line in pressed.stderr.splitlines() if "resume='auto'" in line]
    assert len(said) == 1
    assert f"Saved runs/{folder.name}/checkpoints" in said[0]
    before = contents(folder)

    new = run_script("False", quiet=True)
    assert new.returncode == 0
    assert contents(folder) == before
    assert len(list(Path("runs").iterdir())) == 2

    continued = run_script("'auto'", quiet=True)
    assert continued.returncode == 0
    assert len(list(Path("runs").iterdir())) == 2
    rows = [(path / "metrics.csv").read_bytes() for path in Path("runs").iterdir()]
    assert rows[0] == rows[1]


@pytest.mark.distributed
def test_ranks_share_one_folder_and_a_restart_continues_there() -> None:
    training = {"directory": os.getcwd(), "fresh": True}
    killed, _ = run_world(2, launched.train_in_the_default_folder, is_killed=True, may_fail=True, **training)
    ends = run_world(2, launched.train_in_the_default_folder, is_killed=False, **training)

    assert killed["exit"] == -signal.SIGKILL
    (folder,) = Path("runs").iterdir()
    assert ends == [[str(folder.absolute()), 4]] * 2
    steps = [line.split(",")[0] for line in (folder / "metrics.csv").read_text().splitlines() if ",train/loss," in line]
    assert steps == ["1", "2", "3", "4"]
