"""Recorded runs are replayed: the same bits from every checkpoint, and planted differences found at their step."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier
from tests.helpers.patience import patience
from tools.kills.__main__ import preloaded
from tools.replays import plants, runs
from tools.replays.subject import Settings, arguments, edited_module, make, usual, usual_module, with_plant
from trainstack.cli.main import main
from trainstack.replaying import ReplayReport, follow, replay
from trainstack.verifying.comparison import checkpoints_of
from trainstack.verifying.trial import start_trial

pytestmark = pytest.mark.processes
WORKERS_AND_EMA = Settings(workers=1, ema=True)


@pytest.fixture(autouse=True)
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork processes from one that has imported torch."""
    module = sys.modules["trainstack.replaying.task"]
    monkeypatch.setattr(module, "multiprocessing", SimpleNamespace(get_context=lambda method: preloaded()))


def record(place: Path, settings: Settings = plants.USUAL, **changes: Any) -> Path:
    """Train in this process, as a script would; returns the folder of the run."""
    args = arguments(place, **changes)
    ts.seed_everything(args.seed)
    module, callbacks = make(settings)
    ts.Trainer(module, args, callbacks=callbacks).train()
    return place


def replayed(place: Path, settings: Settings = plants.USUAL, **options: Any) -> ReplayReport:
    options = {"quiet": True, "timeout_s": patience(60), **options}
    return replay(functools.partial(make, settings), place, **options)


def files_of(place: Path) -> list[tuple[str, int, int, int]]:
    stats = ((path, path.stat()) for path in sorted(place.rglob("*")))
    return [(str(path), one.st_mtime_ns, one.st_ctime_ns, one.st_size) for path, one in stats]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The usual run with a full record."""
    return record(tmp_path_factory.mktemp("full") / "run", record="full", **plants.ARGUMENTS)


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The usual run with the default record."""
    return record(tmp_path_factory.mktemp("default") / "run", **plants.ARGUMENTS)


def test_a_replay_has_the_same_bits_and_writes_nothing(tmp_path: Path) -> None:
    place = record(tmp_path / "run", WORKERS_AND_EMA, record="full", gpu_batch_size_limit=3)
    before = files_of(place)
    for first, compared in ((1, (4, 6, 8, 12, 16, 18)), (9, (12, 16, 18))):
        report = replayed(place, WORKERS_AND_EMA, from_step=first, workers=0 if first == 9 else None)
        assert report.same, report
        assert (report.first_step, report.last_step, report.checkpoints) == (first, 18, compared)
        assert report.details == 19 - first
        assert report.notes == ()
    assert files_of(place) == before


@pytest.mark.distributed
@pytest.mark.long
def test_runs_of_all_kinds_have_the_same_bits(tmp_path: Path) -> None:
    """`python -m tools.replays` replays 40 of them."""
    for number in (0, 5, 11, 14, 19):
        case = runs.cases()[number]
        outcome = runs.attempt(case, tmp_path / str(number), preloaded(), random.Random(number))
        assert runs.is_good(outcome), (case.name, outcome)


def test_an_interrupted_run_is_replayed_without_interruption(tmp_path: Path) -> None:
    """The replay begins before the stop and ends after it, in another epoch."""
    place, stop = tmp_path / "run", [7, 13]
    for _ in range(3):
        args = arguments(place)
        ts.seed_everything(args.seed)
        trainer = ts.Trainer(usual()[0], args)
        if stop:
            _ = trainer.plan
            trainer.call_at_step(stop.pop(0), lambda one: one.request_stop("to continue later"))
        trainer.train()
        trainer.close()
    report = replayed(place, from_step=5)
    assert report.same, report
    assert (report.first_step, report.last_step) == (5, 18)


FAST = ("a hook that draws from numpy",)


@pytest.mark.parametrize(
    "plant",
    [
        plant if plant.name in FAST else pytest.param(plant, marks=pytest.mark.long)
        for plant in plants.plants()
        if not plant.says
    ],
    ids=lambda plant: plant.name,
)
def test_a_full_record_shows_a_difference_at_its_step(plant: plants.Plant, full: Path, tmp_path: Path) -> None:
    report = plants.find(plant, full, tmp_path, preloaded())
    assert plants.problem_of(plant, report, "full") is None


def test_a_default_record_names_the_parameter_by_the_next_checkpoint(default: Path) -> None:
    planted = with_plant(Settings(), "one bit of a weight", 7)
    report = replayed(default, planted, from_step=7)
    found = report.first_difference
    assert found is not None
    assert (found.step, found.quantity) == (8, "forward")
    assert found.parameter == "module_interface_state['net.0.weight']"
    assert "In the checkpoint of step 8, the first parameter that differs is" in found.shown_by
    assert "NOT THE SAME: step 8, forward, rank 0: loss " in str(report)
    planted = with_plant(Settings(), "one bit of a weight", 9)
    before = replayed(default, planted, from_step=9, to_step=10)
    assert before.first_difference is not None
    assert (before.first_difference.step, before.first_difference.parameter) == (10, None)
    assert "no stored checkpoint of a later step was replayed" in str(before)


@pytest.mark.long
def test_a_checkpoint_may_differ_before_a_step_does(default: Path) -> None:
    """The hook acts before the save after step 6, and step 7 is the first with other values."""
    report = replayed(default, with_plant(Settings(), "one bit of a weight", 6), from_step=5)
    found = report.first_difference
    assert found is not None
    assert (found.step, found.quantity) == (6, "optimizer")
    assert found.parameter == "module_interface_state['net.0.weight']"


def test_a_damaged_checkpoint_is_replaced_by_an_older_one(default: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(default, place)
    (checkpoint,) = (info.path for info in checkpoints_of(place) if info.global_step == 8)
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    report = replayed(place, from_step=9, to_step=10)
    assert not report.same
    assert report.first_difference is None
    assert report.began_from == "checkpoint-000000006"
    assert "DAMAGED: " in str(report)
    assert "checkpoint-000000008" in str(report)


def test_each_step_is_replayed_with_the_arguments_of_its_session(tmp_path: Path) -> None:
    """The second session has another clipping norm; `config.yaml` has only its arguments."""
    place = record(tmp_path / "run", epochs=1, max_grad_norm=0.1)
    record(place, epochs=2, max_grad_norm=0.05)
    report = replayed(place)
    assert report.same, report
    assert (report.first_step, report.last_step) == (1, 12)
    changed = ts.TrainerArguments.from_yaml(place / "config.yaml")
    other = replayed(place, args=changed, to_step=6)
    assert not other.same
    assert any("max_grad_norm was 0.1, and is 0.05" in note for note in other.notes)


@pytest.mark.skipif(importlib.util.find_spec("cryptography") is None, reason="needs cryptography")
def test_a_replay_neither_signs_nor_verifies_its_steps(tmp_path: Path) -> None:
    """A replay needs no key of the run, and reports another environment in a note."""
    key = tmp_path / "release.pem"
    ts.make_key(key)
    saving = ts.DefaultCheckpointerArguments(every_n_steps=4, sign_key=key, scrub_every_s=60)
    place = record(tmp_path / "run", strict_resume=True, verify_replay=1.0, max_steps=8, checkpointer_args=saving)
    key.unlink()
    report = replayed(place, from_step=6)
    assert report.same, report


@pytest.mark.distributed
@pytest.mark.long
def test_a_run_of_two_ranks_is_replayed_by_one(tmp_path: Path) -> None:
    settings = Settings(dropout=0.0, schedule="")  # its length would be an estimate that depends on the processes
    args = arguments(tmp_path / "run", backend="ddp", epochs=1, strict_resume=True)  # a replay refuses no difference
    call = runs.pickle_call(functools.partial(make, settings), (args,), "a test")
    with start_trial(call, tmp_path / "train", 2, preloaded(), patience(60)) as trial:
        trial.is_over()
    place = tmp_path / "run"
    same = replayed(place, settings, from_step=5)
    assert same.same, same
    assert same.nproc == 2
    assert replayed(place, settings, nproc=1, from_step=5).same
    one = replayed(place, settings, nproc=1)
    assert one.same, str(one)
    assert one.tolerance == 1e-4
    assert one.largest_error is not None
    assert one.largest_error < 1e-5
    wrong = replayed(place, dataclasses.replace(settings, smoothing=0.01), nproc=1, to_step=3)
    assert wrong.first_difference is not None
    assert (wrong.first_difference.step, wrong.first_difference.quantity) == (1, "forward")


@pytest.mark.long
def test_a_run_that_fails_again_is_compared_until_then(tmp_path: Path) -> None:
    """The record ends before the step that was not finite, and so does the replay."""
    planted = with_plant(Settings(), "an overflow", 7)
    with pytest.raises(ts.NonFiniteError):
        record(tmp_path / "run", planted, log_every=1)
    report = replayed(tmp_path / "run", planted)
    assert report.same, report
    earlier = replayed(tmp_path / "run", with_plant(Settings(), "an overflow", 5)).first_difference
    assert earlier is not None
    assert (earlier.step, earlier.quantity, earlier.replayed) == (5, "forward", "loss nan")
    with pytest.raises(ts.LaunchError, match=r"replay: the process .*(?s:.*)AttributeError"):
        replay(functools.partial(make, "no settings"), tmp_path / "run", quiet=True)


def test_the_command_prints_and_returns_the_result(
    default: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    word = "tools.replays.subject"
    assert main(["replay", str(default), f"{word}:usual_module", "--from", "9", "--to", "11"]) == 0
    said = capsys.readouterr().out
    assert "replays steps 9 to 11 from checkpoint-000000008 with 1 process\n" in said
    assert "same bits: steps 9 to 11 (" in said
    assert main(["replay", str(default), f"{word}:edited_module", "--from", "17", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    assert found["first_difference"]["step"] == 17
    assert found["first_difference"]["quantity"] == "forward"
    assert edited_module().settings != usual_module().settings


def refused(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["replay", *words]) == 2
    return capsys.readouterr().err


def test_a_target_in_a_file_is_not_imported(default: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "run"
    shutil.copytree(default, place)
    config = place / "config.yaml"
    config.write_text(config.read_text() + "target: evil_module:Module\n")
    (tmp_path / "evil_module.py").write_text("raise SystemExit(3)\n")
    said = refused(str(place), capsys=capsys)
    assert "replay needs the module after the folder of the run" in said
    assert "names 'evil_module:Module': write that, if you trust the file" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--from", "19"), "--from 19: "),
        (("--to", "0"), "has steps 1 to 18 recorded"),
        (("--from", "9", "--to", "3"), "the first step comes after the last"),
        (("--nproc", "2"), "in one process. Remove nproc"),
        (("--nproc", "0"), "nproc=0: write a number above 0"),
        (("--follow", "--to", "3"), "Remove --from and --to"),
    ],
)
def test_wrong_command_line_arguments_are_refused_with_a_correction(
    words: tuple[str, ...],
    sentence: str,
    default: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    assert sentence in refused(str(default), "tools.replays.subject:usual_module", *words, capsys=capsys)


def test_runs_that_cannot_be_replayed_are_refused_with_the_reason(tmp_path: Path) -> None:
    def reason(place: Path, **options: Any) -> str:
        with pytest.raises(ts.ConfigurationError) as caught:
            replayed(place, **options)
        return str(caught.value)

    assert "is not the folder of a run" in reason(tmp_path)
    place = record(tmp_path / "off", record="off", epochs=1)
    assert "has no recorded steps" in reason(place)
    place = record(tmp_path / "gone", epochs=1)
    (place / "config.yaml").unlink()
    assert "Pass them: args=..., or --config FILE" in reason(place)
    shutil.rmtree(place / "checkpoints")
    assert "has steps 1 to 6 recorded" in reason(place, args=arguments(place), from_step=40)


@pytest.mark.usefixtures("unprobed")
def test_a_private_run_is_refused(tmp_path: Path) -> None:
    private = ts.DifferentialPrivacyArguments(noise_multiplier=1.0, delta=1e-4)
    changes: dict[str, Any] = {"backend": "sp-dp", "epochs": 1, "differential_privacy_args": private}
    args = arguments(tmp_path / "run", **changes)
    ts.Trainer(Classifier(), args).train()
    with pytest.raises(ts.ConfigurationError, match="its batches and its noise come from secret random numbers"):
        replay(Classifier, tmp_path / "run", quiet=True)


@pytest.mark.long
def test_a_live_run_is_followed_until_it_ends_or_differs(tmp_path: Path) -> None:
    for folder, settings in (("same", Settings()), ("other", with_plant(Settings(), "one bit of a weight", 9))):
        place, reports = tmp_path / folder / "run", list[ReplayReport]()
        saving = ts.DefaultCheckpointerArguments(every_n_steps=2, keep_last=1)
        args = arguments(place, checkpointer_args=saving)
        call = runs.pickle_call(functools.partial(make, Settings(dropout=0.31, workers=1)), (args,), "a test")
        with start_trial(call, tmp_path / folder / "train", None, preloaded(), patience(60)):
            while not (place / "run-record.json").exists():
                time.sleep(0.01)
            chosen = dataclasses.replace(settings, dropout=0.31)
            last = follow(functools.partial(make, chosen), place, interval_s=0.05, say=reports.append)
        assert last is reports[-1]
        assert last.same == (folder == "same")
        if folder == "same":
            assert [one.first_step for one in reports[1:]] == [one.last_step + 1 for one in reports[:-1]]
            assert (reports[0].first_step, reports[-1].last_step) == (1, 18)
        else:
            assert last.first_difference is not None
            assert last.first_difference.step == 10


@pytest.mark.long
def test_a_finished_run_is_replayed_immediately(default: Path) -> None:
    reports = list[ReplayReport]()
    says: Callable[[ReplayReport], None] = reports.append
    last = follow(usual, default, interval_s=60, say=says, timeout_s=patience(60))
    assert reports == [last]
    assert last is not None
    assert last.same, last
    assert (last.first_step, last.last_step) == (1, 18)
