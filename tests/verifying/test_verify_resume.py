"""`verify_resume` compares a killed and resumed training with an unbroken one, and finds the cause of a difference.

The page docs/verifying.md runs it as users do, in new processes. Here they are forks of one that has imported torch.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import RandomSampler

import trainstack as ts
from tests.helpers.forgetful import (
    Constant,
    CountsOutside,
    Fails,
    Forgets,
    NeverTheSame,
    Remembers,
    Slow,
    forgets_in_a_callback,
)
from tests.helpers.modules import REPRODUCIBLE, arguments
from tests.helpers.patience import patience
from tests.helpers.sharded_meta import meta_with_callbacks
from tools.kills.__main__ import preloaded, run
from trainstack.verifying import trials, verify
from trainstack.verifying.changes import break_restore, limit_workers
from trainstack.verifying.coverage import Choices, Outline, draw_moments, not_covered
from trainstack.verifying.trial import Surroundings

pytestmark = pytest.mark.distributed
SAVING = ts.DefaultCheckpointerArguments(every_n_steps=2, keep_last=None)


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `verify_resume` with one kill in the first half of a training of 12 steps."""
    monkeypatch.setattr(verify, "multiprocessing", SimpleNamespace(get_context=lambda method: preloaded()))
    monkeypatch.setattr(verify, "tempfile", SimpleNamespace(mkdtemp=lambda prefix: str(tmp_path / "proof")))

    def call(module: Any, vary: bool = False, **changes: Any) -> ts.ResumeReport:
        args = arguments(tmp_path, **{"epochs": 2, "checkpointer_args": SAVING, **changes})
        return ts.verify_resume(module, args, kills=1, seed=10, vary=vary, timeout_s=patience(30))

    return call


def test_a_training_that_resumes_exactly_is_reported_as_same(
    verified: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = dataclasses.replace(SAVING, async_save=True)
    report = verified(Remembers, vary=True, checkpointer_args=saving, nonfinite="skip")

    assert report.same
    assert report.steps == 12
    assert report.counting == 1
    kill = report.kills[-1]
    assert kill.counts
    assert 0 < kill.resumed_from < report.steps
    assert kill.resumed_from <= kill.at_step + 1 <= report.steps + 1  # a kill within the last save counts too
    assert report.blind_to == ""
    said = capsys.readouterr().out
    assert "the same bits: module (xxh3-128 " in said
    assert "after 1 kill that counts\n" in said
    assert "not covered: " in said
    untried = "foreground" if kill.surroundings.async_save else "background"  # a late kill of the first does not count
    assert f"saves in the {untried}" in said
    assert list(tmp_path.iterdir()) == [], "the check wrote files"


def test_a_module_with_lost_state_is_reported(verified: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = verified(Forgets)

    assert not report.same
    assert report.untracked == ("self.seen",)
    assert report.divergence.same_at < report.divergence.diverged_at <= 12
    counting = next(kill for kill in report.kills if kill.counts)  # not one at the end of the training
    assert counting.resumed_from < report.divergence.diverged_at
    said = capsys.readouterr().out
    assert "NOT THE SAME: module_interface_state" in said
    assert "Training changes self.seen, and get_state does not return it" in said
    assert "Return it from get_state of the module or the callback and restore it in update_state" in said
    assert (report.folder / "unbroken").is_dir()
    shutil.rmtree(report.folder)


def test_lost_state_outside_of_the_module_is_reported(verified: Any) -> None:
    report = verified(CountsOutside)

    assert not report.same
    assert report.untracked == ()
    assert "Look for other dependencies of a step: a global variable" in str(report)


def test_a_training_that_is_not_repeatable_is_reported_so(verified: Any) -> None:
    report = verified(NeverTheSame)

    assert report.divergence.same_at == 0
    assert report.divergence.diverged_at == 2
    assert "not repeatable even without a kill" in str(report)


def test_the_error_for_a_failed_training_has_its_output(verified: Any) -> None:
    with pytest.raises(ts.LaunchError, match=r"process-0 ended with exit code 1(?s:.*)the data is gone"):
        verified(Fails)


def test_arguments_without_a_valid_test_are_refused(verified: Any, tmp_path: Path) -> None:
    def refused(sentence: str, **changes: Any) -> None:
        with pytest.raises(ts.ConfigurationError, match=sentence):
            ts.verify_resume(Slow, arguments(tmp_path, **{"checkpointer_args": SAVING, **changes}))

    refused("nothing is saved", checkpointer_args=ts.DefaultCheckpointerArguments(checkpoint=False))
    refused("debug_seed", backend="sp-dp", differential_privacy_args=dataclasses.replace(REPRODUCIBLE, debug_seed=None))
    with pytest.raises(ts.ConfigurationError, match="by pickle, which refuses"):
        ts.verify_resume(lambda: Slow(), arguments(tmp_path, checkpointer_args=SAVING))
    for wrong in ({"kills": 0}, {"nproc": 2}, {"timeout_s": 0.0}):
        with pytest.raises(ts.ConfigurationError, match="rite"):
            ts.verify_resume(Slow, arguments(tmp_path), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match="saves only once, at its end"):
        verified(Slow, epochs=1, checkpointer_args=ts.DefaultCheckpointerArguments())


@pytest.mark.spec("F116", "F403")
@pytest.mark.long
def test_runs_killed_during_saves_end_with_the_same_bits() -> None:
    """`make kills` kills 200 times, in the other combinations too."""
    assert run([("sp-amp", True), ("ddp", False)], kills=2, seed=1)


def test_a_comparison_that_misses_lost_state_is_not_proof(verified: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The check also resumes with a parameter that is not restored, which must change the bits."""
    report = verified(Constant)

    assert report.divergence is None
    assert report.counting == 1
    assert report.blind_to == "net.0.weight"
    assert "a training whose 'net.0.weight' was not restored ended with the same bits" in capsys.readouterr().out
    with pytest.raises(ts.ConfigurationError, match="not proved: a training whose"):
        _ = report.same


def test_a_factory_may_return_callbacks_to_compare(verified: Any) -> None:
    report = verified(forgets_in_a_callback)

    assert not report.same
    assert report.divergence.difference.startswith("callback_states")


@pytest.mark.long
@pytest.mark.parametrize("way", ["streamed", "sharded"])
def test_a_sharded_training_resumes_with_the_same_bits(verified: Any, way: str) -> None:
    """The second way has a module on the meta device, an average and a frozen layer, and saves in the background."""
    sharded = way == "sharded"
    saving = dataclasses.replace(SAVING, sharded=sharded, async_save=sharded)
    report = verified(meta_with_callbacks if sharded else Remembers, backend="fsdp", checkpointer_args=saving)

    assert report.nproc == 2
    assert report.counting == 1
    assert report.same


STEPS, PER_EPOCH = 40, 10
OUTLINE = Outline(
    place=Path(),
    seconds=4.0,
    steps=STEPS,
    steps_per_epoch=PER_EPOCH,
    first_save=7,
    workers=2,
    untracked=(),
    choices=Choices(threads=(None, 2), workers=(None, 0, 1), async_save=(False, True)),
)


def report_of(*kills: ts.KillEvent, **changes: Any) -> ts.ResumeReport:
    values = {"backend": "sp", "nproc": 1, "steps": STEPS, "seconds": 1.0, "model_hash": "0" * 32, "asked": 2}
    return ts.ResumeReport(kills=kills, **{**values, **changes})


def kill(step: int, **changes: Any) -> ts.KillEvent:
    made = ts.KillEvent(training=1, at_step=step, resumed_from=0, seconds=1.0, while_saving=False)
    return dataclasses.replace(trials._resumed(made, step, Surroundings(), OUTLINE), **changes)


def test_kills_count_only_after_a_checkpoint_and_before_the_end() -> None:
    """A kill at the last step, or before the first checkpoint, shows no lost state."""
    assert [kill(step).counts for step in (0, 1, STEPS - 1, STEPS)] == [False, True, True, False]
    nothing = report_of(kill(0), kill(STEPS))
    assert "not proved: 0 of 2 kills resumed within the training" in str(nothing)
    assert str(nothing).count("does not count") == 2
    with pytest.raises(ts.ConfigurationError, match="not proved: 0 of 2 kills"):
        _ = nothing.same
    part = report_of(kill(0), kill(3))
    assert part.same
    assert part.counting == 1
    assert "after 1 of 2 kills that count" in part.verdict


def test_kills_occur_during_saves_and_throughout_an_epoch() -> None:
    """All moments are after the first checkpoint and before the last step."""
    for seed in range(50):
        moments = draw_moments(random.Random(seed), 5, OUTLINE, before=0)
        assert [moment.step for moment in moments] == sorted(moment.step for moment in moments)
        assert all(7 <= moment.step < STEPS for moment in moments)
        assert sum(moment.while_saving for moment in moments) == 2
        assert any(moment.step % PER_EPOCH == 1 and not moment.while_saving for moment in moments)
        assert any(moment.step % PER_EPOCH == 0 and not moment.while_saving for moment in moments)
    one_epoch = dataclasses.replace(OUTLINE, steps=6, first_save=5)
    assert {moment.step for moment in draw_moments(random.Random(0), 5, one_epoch, before=0)} == {5}


def test_the_report_lists_cases_without_a_test() -> None:
    assert not_covered(report_of(kill(0)), OUTLINE) == (
        "checkpoints at the start and the middle and the end of an epoch",
        "a kill during a save",
        "saves in the foreground",
        "saves in the background",
        "another number of threads",
        "another number of loader workers",
    )
    whole = [
        kill(11, while_saving=True),
        kill(15, surroundings=Surroundings(async_save=True, threads=2, workers=0)),
        kill(20),
    ]
    assert not_covered(report_of(*whole), OUTLINE) == ()
    alone = dataclasses.replace(OUTLINE, workers=0, choices=Choices())
    assert not_covered(report_of(*whole[::2]), alone) == (
        "checkpoints at the middle of an epoch",
        "saves in the background",
        "another number of threads (it would change the bits, or was not tried)",
        "another number of loader workers (there are none to leave out)",
    )


def test_limit_workers_keeps_persistent_workers() -> None:
    usual = Remembers(num_workers=2)
    asked = limit_workers(usual, 1)
    assert usual.get_train_dataloader(RandomSampler, 4).num_workers == 1
    assert asked == [2]
    persistent = Remembers(num_workers=2, persistent_workers=True)
    assert limit_workers(persistent, 0) == []
    assert persistent.get_train_dataloader(RandomSampler, 4).num_workers == 2


def test_break_restore_skips_one_parameter() -> None:
    source, module = Remembers(seed=1), Remembers(seed=2)
    broken = break_restore(module)
    fresh = {name: value.clone() for name, value in module.state_dict().items()}
    for _ in range(2):  # a resume may restore twice
        module.update_state(source.get_state())
    assert set(broken) == {"net.0.weight"}
    for name, value in module.state_dict().items():
        assert value.equal(fresh[name] if name == "net.0.weight" else source.state_dict()[name])
