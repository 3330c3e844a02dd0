"""Which checkpoints remain after a save, which is the best, and the targets of the pointers."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpointing.support import flip_bit, make_checkpoint, mark_of
from tests.checkpointing.test_crash import instrument
from tests.helpers.patience import patience
from trainstack.checkpointing import (
    Checkpoint,
    CheckpointInfo,
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
    default_checkpointer,
    filesystem,
    list_checkpoints,
    read_model,
    retention,
    tensorfile,
    verify_checkpoint,
)
from trainstack.errors import CheckpointNotFoundError, ConfigurationError

NAN, INF = math.nan, math.inf


def checkpointer(directory: Path, **fields: Any) -> DefaultCheckpointer:
    """One that keeps everything unless `fields` say otherwise."""
    fields = {"keep_last": None, "keep_best": 0, **fields}
    return DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(directory), **fields))


def measured(step: int, value: float | None = None, *, pinned: bool = False) -> Checkpoint:
    """A checkpoint with which the validation loss `value` was measured."""
    checkpoint = make_checkpoint(step, step=step)
    metrics = {"train/loss": 1.0} | ({} if value is None else {"val/loss": value})
    checkpoint.metadata = {"metrics": metrics} | ({"pinned": True} if pinned else {})
    return checkpoint


def save_all(saver: DefaultCheckpointer, values: list[float | None], first: int = 1) -> None:
    for step, value in enumerate(values, first):
        saver.save(measured(step, value), step)


def steps(directory: Path) -> set[int | None]:
    return {info.global_step for info in list_checkpoints(directory) if info.kind == "checkpoint"}


def pointed(path: Path) -> int:
    """The step that a pointer names, whose checkpoint must be whole."""
    body = json.loads(path.read_text())
    info = verify_checkpoint(path.parent / body["checkpoint"])
    assert info.global_step == body["global_step"]
    return int(body["global_step"])


# --- kept checkpoints---------------------------------------------------------------------------------------


def test_by_default_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    saver = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(tmp_path)))
    save_all(saver, [3.0, 1.0, 2.0, None, NAN])
    assert steps(tmp_path) == {2, 4, 5}


def test_without_keep_last_everything_is_kept(tmp_path: Path) -> None:
    saver = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(tmp_path), keep_last=None))
    assert saver.keeps_best_by is None
    save_all(saver, [3.0, 1.0, 2.0, None, NAN])
    assert steps(tmp_path) == {1, 2, 3, 4, 5}


@pytest.mark.spec("HZ-19", "FN-54")
def test_the_newest_and_the_best_remain(tmp_path: Path) -> None:
    save_all(checkpointer(tmp_path, keep_last=2, keep_best=1), [3.0, 1.0, 2.0, 4.0, 5.0])
    assert steps(tmp_path) == {2, 4, 5}
    assert (pointed(tmp_path / "last"), pointed(tmp_path / "best")) == (5, 2)
    assert not list(tmp_path.glob(".*"))


def test_an_error_for_a_run_folder_names_newest_and_best(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save_all(checkpointer(folder, keep_last=2, keep_best=1), [1.0, 2.0])
    for place in (tmp_path, folder):
        with pytest.raises(CheckpointNotFoundError) as caught:
            read_model(place)
        newest, best = folder / "checkpoint-000000002", folder / "best"
        assert str(caught.value).endswith(f"Name one of those in it, such as {newest}, or {best} for the best.")
    assert (verify_checkpoint(newest).global_step, verify_checkpoint(best).global_step) == (2, 1)


def test_for_a_metric_that_should_be_high_the_highest_remain(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, keep_last=1, keep_best=2, mode="max")
    save_all(saver, [3.0, 1.0, 2.0, 4.0, 0.0])
    assert steps(tmp_path) == {1, 4, 5}
    best = saver.best()
    assert best is not None
    assert (best.global_step, best.metrics) == (4, {"train/loss": 1.0, "val/loss": 4.0})


@pytest.mark.spec("F208", "F409")
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, None])
def test_a_value_that_is_missing_or_not_finite_never_wins(tmp_path: Path, mode: Any, bad: float | None) -> None:
    saver = checkpointer(tmp_path, keep_last=1, keep_best=1, mode=mode)
    save_all(saver, [bad, 1.0, bad, bad])
    assert steps(tmp_path) == {2, 4}
    save_all(checkpointer(tmp_path / "none", mode=mode), [bad, bad])
    assert checkpointer(tmp_path / "none", mode=mode).best() is None
    assert not (tmp_path / "none" / "best").exists()


def test_of_equal_values_the_first_stays_the_best(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, keep_last=1, keep_best=1)
    save_all(saver, [1.0, 1.0, 1.0])
    assert steps(tmp_path) == {1, 3}


VALUES = st.lists(st.one_of(st.none(), st.sampled_from([NAN, INF, -INF]), st.integers(-3, 3).map(float)), max_size=9)


@pytest.mark.slow
@pytest.mark.spec("F208", "F409")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=VALUES, last=st.integers(1, 3), best=st.integers(0, 3), mode=st.sampled_from(["min", "max"]))
def test_the_last_n_and_the_best_k_remain(
    tmp_path: Path, values: list[float | None], last: int, best: int, mode: Any
) -> None:
    directory = tmp_path / str(next(COUNT))
    for step, value in enumerate(values):  # a new process each time: its only memory is the disk
        checkpointer(directory, keep_last=last, keep_best=best, mode=mode).save(measured(step, value), step)
    finite = [(v if mode == "min" else -v, s) for s, v in enumerate(values) if v is not None and math.isfinite(v)]
    expected = {*range(len(values))[-last:], *(step for _, step in sorted(finite)[:best])}
    if values:
        assert steps(directory) == expected
        assert pointed(directory / "last") == len(values) - 1
        remaining = sorted(entry for entry in finite if entry[1] in expected)
        assert (directory / "best").exists() == bool(remaining)
        if remaining:
            assert pointed(directory / "best") == remaining[0][1]
    shutil.rmtree(directory, ignore_errors=True)


COUNT = itertools.count()


def test_retention_includes_checkpoints_of_earlier_processes(tmp_path: Path) -> None:
    save_all(checkpointer(tmp_path), [2.0, 1.0, 3.0, 4.0])
    resumed = checkpointer(tmp_path, keep_last=1, keep_best=1)
    assert mark_of(resumed.load(True)) == 4
    resumed.begin_run(resumed=True)
    assert steps(tmp_path) == {2, 4}  # also a checkpoint that an interrupted run had no time to delete
    resumed.save(measured(5, 5.0), 5)
    assert steps(tmp_path) == {2, 5}


# --- checkpoints that are never deleted------------------------------------------------------------------------------


def test_only_checkpoints_of_this_run_and_prefix_are_deleted(tmp_path: Path) -> None:
    save_all(checkpointer(tmp_path), [1.0, 2.0])
    save_all(checkpointer(tmp_path, file_prefix="other"), [1.0, 2.0], first=100)
    save_all(checkpointer(tmp_path, file_prefix="exception"), [1.0], first=200)
    saver = checkpointer(tmp_path, keep_last=1)
    saver.begin_run(resumed=False)
    saver.save_model({"w": torch.ones(1)}, 1)
    save_all(saver, [1.0, 2.0], first=3)
    os.rename(tmp_path / "checkpoint-000000004", tmp_path / "mine")
    save_all(saver, [3.0, 4.0], first=5)
    assert steps(tmp_path) == {1, 2, 100, 101, 200, 4, 6}
    assert (tmp_path / "mine").is_dir()
    assert (tmp_path / "checkpoint-model-000001").is_dir()
    assert pointed(tmp_path / "other-last") == 101


def test_a_run_that_came_from_elsewhere_keeps_existing_checkpoints(tmp_path: Path) -> None:
    save_all(checkpointer(tmp_path / "a"), [1.0, 2.0])
    save_all(checkpointer(tmp_path / "b"), [1.0])
    saver = checkpointer(tmp_path / "a", keep_last=1)
    saver.load(tmp_path / "b")
    saver.begin_run(resumed=True)
    save_all(saver, [1.0, 2.0], first=7)
    assert steps(tmp_path / "a") == {1, 2, 8}


@pytest.mark.parametrize("how", ["by the arguments", "by hand"])
def test_retention_works_after_earlier_runs_were_deleted(tmp_path: Path, how: str) -> None:
    save_all(checkpointer(tmp_path), [1.0, 2.0])
    fresh = checkpointer(tmp_path, keep_last=1, delete_existing_checkpoints=how == "by the arguments")
    fresh.begin_run(resumed=False)
    if how == "by hand":
        for info in list_checkpoints(tmp_path):
            shutil.rmtree(info.path)
    save_all(fresh, [3.0, 4.0], first=7)

    assert steps(tmp_path) == {8}
    assert pointed(tmp_path / "last") == 8
    assert mark_of(checkpointer(tmp_path).load(True)) == 8


def test_a_fresh_run_reports_checkpoints_of_an_earlier_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = checkpointer(tmp_path)
    first.begin_run(resumed=False)
    save_all(first, [1.0, 2.0])
    checkpointer(tmp_path).begin_run(resumed=True)
    checkpointer(tmp_path, delete_existing_checkpoints=True).begin_run(resumed=False)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    fresh = checkpointer(tmp_path)
    fresh.begin_run(resumed=False)
    (said,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    newest = tmp_path / "checkpoint-000000002"
    assert said.startswith(f"{tmp_path} has 2 checkpoints of an earlier run. This run neither resumes from there nor")
    assert f"To resume from the newest write resume='{newest}'; to keep runs apart give this another" in said
    assert mark_of(checkpointer(tmp_path).load(newest)) == 2
    save_all(fresh, [7.0])
    found = [(info.global_step, info.metrics["val/loss"]) for info in list_checkpoints(tmp_path)]
    assert found == [(1, 1.0), (2, 2.0), (1, 7.0)]  # of the same step, the earlier run's is not replaced
    assert list_checkpoints(tmp_path)[-1].name == f"checkpoint-000000001.{str(fresh.run_id)[:8]}"
    save_all(fresh, [8.0])
    found = [(info.global_step, info.metrics["val/loss"]) for info in list_checkpoints(tmp_path)]
    assert found == [(1, 1.0), (2, 2.0), (1, 8.0)]  # its own is


def test_a_pinned_checkpoint_remains_in_addition_to_the_others(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, keep_last=1, keep_best=1)
    saver.save(measured(1, 0.5, pinned=True), 1)
    save_all(saver, [3.0, 2.0, 4.0], first=2)
    saver.save(measured(5, 9.0, pinned=True), 5)
    assert steps(tmp_path) == {1, 3, 4, 5}
    assert (pointed(tmp_path / "last"), pointed(tmp_path / "best")) == (5, 1)


def test_a_pinned_step_that_is_saved_again_stays_pinned(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, keep_last=1)
    saver.save(measured(1, pinned=True), 1)
    saver.save(measured(1, 0.5), 1)
    save_all(saver, [2.0, 3.0], first=2)
    assert steps(tmp_path) == {1, 3}
    assert list_checkpoints(tmp_path)[0].metrics["val/loss"] == 0.5
    fresh = checkpointer(tmp_path, keep_last=1)
    fresh.begin_run(resumed=False)
    save_all(fresh, [1.0, 2.0])  # its own step 1 is not pinned
    assert [info.global_step for info in list_checkpoints(tmp_path)] == [1, 3, 2]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, keep_last=2, keep_best=1)
    save_all(saver, [2.0, 1.0, 4.0])
    os.truncate(tmp_path / "checkpoint-000000003" / "model.safetensors", 10)
    os.truncate(tmp_path / "checkpoint-000000002" / "state.json", 1)
    save_all(saver, [6.0, 5.0, 7.0], first=4)
    assert steps(tmp_path) == {2, 3, 5, 6}  # damaged ones remain for an inspection
    assert (pointed(tmp_path / "last"), pointed(tmp_path / "best")) == (6, 5)


@pytest.mark.skipif(os.name == "nt", reason="needs symlinks")
def test_a_link_is_not_followed_to_be_deleted(tmp_path: Path) -> None:
    save_all(checkpointer(tmp_path / "real"), [1.0])
    saver = checkpointer(tmp_path / "a", keep_last=1)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoint-000000001").symlink_to(tmp_path / "real" / "checkpoint-000000001")
    save_all(saver, [2.0, 3.0], first=2)
    assert mark_of(checkpointer(tmp_path / "real").load(True)) == 1
    assert (tmp_path / "a" / "checkpoint-000000001").exists()


def test_a_failing_deletion_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = checkpointer(tmp_path, keep_last=1)
    save_all(saver, [1.0])

    def refuse(source: Path, target: Path) -> None:
        if "000001" in source.name:
            raise OSError(errno.EACCES, "Permission denied")
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "rename", refuse)
        save_all(saver, [2.0], first=2)
    assert "checkpoint-000000001 is no longer needed and could not be deleted" in caplog.text
    assert steps(tmp_path) == {1, 2}
    save_all(saver, [3.0], first=3)
    assert steps(tmp_path) == {3}


def test_a_deletion_is_durable_before_the_first_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = checkpointer(tmp_path, keep_last=1)
    save_all(saver, [1.0])
    calls: list[str] = []
    instrument(monkeypatch, lambda number, name, args: calls.append(name))
    save_all(saver, [2.0], first=2)
    assert calls[-3:] == ["rename", "sync_directory", "remove_tree"]
    assert calls.index("replace") < len(calls) - 3  # the pointers no longer name a checkpoint that is deleted next


def test_a_failure_after_a_save_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    saver = checkpointer(tmp_path, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "replace", refuse)
        save_all(saver, [1.0])
    assert f"the pointer {tmp_path / 'last'} could not be written" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(retention, "of_run", refuse)
        save_all(saver, [2.0], first=2)
    assert "no older checkpoint was deleted" in caplog.text
    assert steps(tmp_path) == {1, 2}


# --- the end of the process, anywhere ----------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("step", [4, pytest.param(3, marks=pytest.mark.long)], ids=["new step", "same step"])
def test_a_process_that_dies_in_retention_keeps_both_pointers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    for point in range(1, 90):
        directory = tmp_path / str(point)
        save_all(checkpointer(directory, keep_last=2, keep_best=1), [1.0, 3.0, 2.0])
        keep = {"keep_last": 1, "keep_best": 1}
        child = os.fork()
        if child == 0:  # ends without running a single handler, as a kill would
            instrument(monkeypatch, lambda number, *_, point=point: os._exit(9) if number == point else None)
            checkpointer(directory, **keep).save(measured(step, 0.5), 4)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        fresh = checkpointer(directory, **keep)
        last, best = fresh.last(), fresh.best()
        assert last is not None
        assert best is not None
        assert mark_of(fresh.load("last")) == last.global_step == mark_of(fresh.load(directory / "last"))
        assert mark_of(fresh.load("best")) == best.global_step == mark_of(fresh.load(directory / "best"))
        assert last.global_step in (3, step)
        assert best.metrics["val/loss"] in (1.0, 0.5)
        for kind in ("last", "best"):
            body = json.loads((directory / kind).read_text())
            assert (directory / body["checkpoint"]).is_dir() or step == 3
        if status == 0:
            assert steps(directory) == {step}
            assert point > 30
            break
        fresh.save(measured(9, 0.1), 9)
        assert steps(directory) == {9}
        assert (pointed(directory / "last"), pointed(directory / "best")) == (9, 9)
        assert not list(directory.glob(".*"))
    else:
        pytest.fail("a save has more calls than the test has points")


# --- pointers ----------------------------------------------------------------------------------------------


def test_the_best_is_found_without_reading_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(checkpointer(tmp_path), [2.0, 1.0, 3.0])
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    monkeypatch.setattr(tensorfile, "read_tensors", None)
    best = checkpointer(tmp_path).best()
    assert best is not None
    assert best.global_step == 2


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\0", b'{"format": "trainstack-pointer", "che'], ids=["none", "0", "torn"]
)
def test_a_torn_pointer_is_ignored_and_mended(tmp_path: Path, content: bytes) -> None:
    save_all(checkpointer(tmp_path), [2.0, 1.0, 3.0])
    for kind, mark in (("last", 3), ("best", 2)):
        (tmp_path / kind).write_bytes(content)
        assert mark_of(checkpointer(tmp_path).load(tmp_path / kind)) == mark
        os.unlink(tmp_path / kind)
        assert mark_of(checkpointer(tmp_path).load(str(tmp_path / kind))) == mark
        (tmp_path / kind).write_bytes(content)
    save_all(checkpointer(tmp_path), [0.5], first=4)
    assert (pointed(tmp_path / "last"), pointed(tmp_path / "best")) == (4, 4)


def test_a_stale_pointer_finds_the_next_checkpoint_of_its_kind(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, file_prefix="a", mode="max")
    save_all(saver, [2.0, 1.0, 3.0])
    shutil.rmtree(tmp_path / "a-000000003")
    stranger = checkpointer(tmp_path / "new")
    assert mark_of(stranger.load(tmp_path / "a-best")) == 1
    assert mark_of(stranger.load(tmp_path / "a-last")) == 2


def test_a_damaged_best_is_replaced_by_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_all(checkpointer(tmp_path), [2.0, 1.0, 3.0])
    flip_bit(tmp_path / "checkpoint-000000002" / "model.safetensors", -1)
    assert mark_of(checkpointer(tmp_path).load("best")) == 1
    assert "checkpoint-000000002" in caplog.text


def test_deleted_checkpoints_leave_no_record_in_memory(tmp_path: Path) -> None:
    save_all(checkpointer(tmp_path, keep_last=1), [None] * 4)
    assert {path.name for path in retention._verified if path.parent == tmp_path} == {"checkpoint-000000004"}


def test_the_number_of_comparisons_grows_linearly_with_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(checkpointer(tmp_path), [None] * 30)
    compare, count = CheckpointInfo.__eq__, itertools.count()
    monkeypatch.setattr(CheckpointInfo, "__eq__", lambda one, other: (next(count), compare(one, other))[1])
    save_all(checkpointer(tmp_path, keep_last=15), [None], first=31)
    assert steps(tmp_path) == set(range(17, 32))
    assert next(count) < 31 * 5


def test_a_file_of_the_user_is_not_a_pointer(tmp_path: Path) -> None:
    (tmp_path / "best").write_text("my notes")
    (tmp_path / "last").mkdir()
    save_all(checkpointer(tmp_path), [2.0, 1.0])
    assert (tmp_path / "best").read_text() == "my notes"
    assert list((tmp_path / "last").iterdir()) == []
    assert steps(tmp_path) == {1, 2}


def test_a_fresh_run_removes_the_pointers_of_an_earlier_run(tmp_path: Path) -> None:
    save_all(checkpointer(tmp_path), [2.0, 1.0])
    fresh = checkpointer(tmp_path, keep_last=1)
    fresh.begin_run(resumed=False)
    assert not (tmp_path / "last").exists()
    assert not (tmp_path / "best").exists()
    assert fresh.last() is None
    assert fresh.best() is None
    for resume in ("best", "last", tmp_path / "best"):
        with pytest.raises(CheckpointNotFoundError, match="one of another run, name it: resume="):
            fresh.load(resume)
    assert steps(tmp_path) == {1, 2}


def test_resume_best_without_a_measurement_names_recorded_metrics(tmp_path: Path) -> None:
    save_all(checkpointer(tmp_path), [None, NAN])
    with pytest.raises(CheckpointNotFoundError, match=r"finite value of 'val/loss'.*Metrics in them: train/loss, val"):
        checkpointer(tmp_path).load("best")
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        checkpointer(tmp_path / "absent").load("best")


# --- the metric --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("min", "val/loss loss valloss val/dice_loss loss_iou perplexity ppl test/wer cer word_error_rate val_rmse"),
        ("max", "val/accuracy acc top5_acc acc1 f1 macro/f1 roc_auc BLEU rougeL rouge2 precision@5 recall mAP map50"),
        ("max", "mIoU r2 ndcg@10 dice"),
    ],
)
def test_the_name_of_a_metric_determines_its_direction(mode: str, names: str) -> None:
    for name in names.split():
        assert DefaultCheckpointerArguments(monitor=name).monitored.mode == mode, name


@pytest.mark.parametrize("name", ["score", "answers", "neg_mean_squared_error", "accuracy_error", "reward", "amapola"])
def test_an_ambiguous_metric_name_needs_a_mode(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"mode='min' or mode='max'"):
        DefaultCheckpointerArguments(monitor=name)
    assert DefaultCheckpointerArguments(monitor=name, mode="max").monitored.mode == "max"


def test_a_metric_that_is_not_measured_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = checkpointer(tmp_path, monitor="val/acuracy", mode="max", log_level="WARNING")
    saver.save(measured(1, 1.0), 0, force=True)  # no validation within an epoch
    assert caplog.text == ""
    save_all(saver, [1.0, 2.0], first=2)
    assert caplog.text.count("'val/acuracy' was not measured at global step 2") == 1
    assert "Measured there: train/loss, val/loss" in caplog.text


def test_nothing_is_logged_where_the_best_is_not_requested(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trainstack"):
        save_all(checkpointer(tmp_path), [None, None])
    assert caplog.text == ""


@pytest.mark.parametrize("metadata", [None, {}, {"metrics": [1]}, {"metrics": {"a": "b"}}, {1: 2}], ids=str)
def test_custom_metadata_is_harmless(tmp_path: Path, metadata: Any) -> None:
    saver = checkpointer(tmp_path)
    checkpoint = make_checkpoint(1, step=1)
    checkpoint.metadata = metadata
    saver.save(checkpoint, 1)
    last = saver.last()
    assert last is not None
    assert (dict(last.metrics), last.pinned, saver.best()) == ({}, False, None)


def test_a_large_checkpoint_is_read_back_while_the_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, read_back = threading.Event(), retention.read_back

    def wait_and_read(path: Path) -> str | None:
        assert may_read.wait(patience(30))
        return read_back(path)

    monkeypatch.setattr(retention, "read_back", wait_and_read)
    monkeypatch.setattr(default_checkpointer, "LARGE", 0)
    saver = checkpointer(tmp_path, keep_last=1)
    save_all(saver, [None, None])
    assert steps(tmp_path) == {1, 2}
    may_read.set()
    save_all(saver, [None], first=3)  # waits for the one before
    assert 1 not in steps(tmp_path)
    saver.finish()
    assert steps(tmp_path) == {3}
