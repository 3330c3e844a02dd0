"""`verify_resume` tells whether a killed and resumed training is the unbroken one, and if not, why.

The page docs/verifying.md runs it as users do, in processes that import everything anew. Here they are forks of one
that has.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.forgetful import CountsOutside, Fails, Forgets, NeverTheSame, Remembers, Slow
from tests.helpers.modules import REPRODUCIBLE, arguments
from tests.helpers.patience import patience
from tools.kills.__main__ import preloaded, run
from trainstack.verifying import verify

pytestmark = pytest.mark.distributed
SAVING = ts.DefaultCheckpointerArguments(every_n_steps=2)


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `verify_resume` with one kill in the first half of a training of 12 steps."""
    monkeypatch.setattr(verify, "multiprocessing", SimpleNamespace(get_context=lambda method: preloaded()))
    monkeypatch.setattr(verify, "tempfile", SimpleNamespace(mkdtemp=lambda prefix: str(tmp_path / "proof")))

    def call(module: Any, **changes: Any) -> ts.ResumeReport:
        args = arguments(tmp_path, **{"epochs": 2, "checkpointer_args": SAVING, **changes})
        return ts.verify_resume(module, args, kills=1, seed=10, timeout_s=patience(30))

    return call


def test_a_training_that_survives_is_said_to(verified: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = dataclasses.replace(SAVING, async_save=True)
    report = verified(Remembers, checkpointer_args=saving, nonfinite="skip")

    assert report.same
    assert report.steps == 12
    (kill,) = report.kills
    assert 0 <= kill.resumed_from <= kill.at_step + 1
    assert kill.at_step <= 12
    assert "the same bits: module (xxh3-128 " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "neither the arguments' folder is touched nor anything left"


def test_a_module_that_forgets_is_reported_with_what_it_forgets(
    verified: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = verified(Forgets)

    assert not report.same
    assert report.untracked == ("seen",)
    assert report.divergence.same_at < report.divergence.diverged_at <= 12
    assert report.kills[0].resumed_from < report.divergence.diverged_at
    said = capsys.readouterr().out
    assert "NOT THE SAME: module_interface_state" in said
    assert "Training changes self.seen of the module" in said
    assert "Return it from get_state and take it back in update_state" in said
    assert (report.folder / "unbroken").is_dir()
    shutil.rmtree(report.folder)


def test_what_lies_outside_of_the_module_is_searched_for_elsewhere(verified: Any) -> None:
    report = verified(CountsOutside)

    assert not report.same
    assert report.untracked == ()
    assert "Look for what else a step depends on: a global variable" in str(report)


def test_a_training_that_is_never_the_same_is_told_from_one_that_forgets(verified: Any) -> None:
    report = verified(NeverTheSame)

    assert report.divergence.same_at == 0
    assert report.divergence.diverged_at == 2
    assert "not repeatable even without a kill" in str(report)


def test_a_training_that_fails_is_shown_with_what_it_printed(verified: Any) -> None:
    with pytest.raises(ts.LaunchError, match=r"process-0 ended with exit code 1(?s:.*)the data is gone"):
        verified(Fails)


def test_what_proves_nothing_is_refused(verified: Any, tmp_path: Path) -> None:
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
def test_runs_that_are_killed_while_they_save_end_with_the_bits_of_unbroken_ones() -> None:
    """`make kills` kills 200 times, in the other combinations too."""
    assert run([("sp", True), ("sp-amp", False), ("ddp", True)], kills=3, seed=1)
