"""The statement of a private run on disk: never below the ledger, and with all that its epsilon rests on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Subset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.patience import patience
from tests.helpers.private_runs import BreaksOff, private, promise
from trainstack.backends.dp import SpendLedger, epsilon_of, ledger
from trainstack.cli.main import main
from trainstack.cli.privacy_ledger import current_statement
from trainstack.errors import CheckpointNotFoundError, PrivacyBudgetError, PrivacyError, PrivacyLedgerError
from trainstack.trainer.callbacks.monitors import MemoryMonitor
from trainstack.trainer.tracking.history import RunHistory
from trainstack.trainer.tracking.provenance import MetricGuard, Provenance

pytestmark = pytest.mark.usefixtures("unprobed")

NOISY = {"noise_multiplier": 1.0}
SAVING = ts.DefaultCheckpointerArguments(every_n_steps=5)
RARELY = ts.DefaultCheckpointerArguments(every_n_steps=1000)


def made(directory: Path, module: Any = None, args: Any = None, **changes: Any) -> ts.Trainer:
    return ts.Trainer(
        module or Classifier(),
        private(directory, args or promise(**NOISY), **{"checkpointer_args": SAVING, **changes}),
    )


def trained(directory: Path, module: Any = None, args: Any = None, **changes: Any) -> ts.PrivacyStatement:
    trainer = made(directory, module, args, **changes)
    trainer.train()
    return trainer.privacy_statement()


def on_disk(directory: Path) -> ts.PrivacyStatement:
    return ts.PrivacyStatement.from_json((directory / "privacy_statement.json").read_text())


def check_bound(directory: Path) -> None:
    """The file states no less than the ledger has."""
    book = SpendLedger(directory / "privacy-ledger.jsonl")
    stated = on_disk(directory).epsilon
    for run in book.runs():
        assert stated is not None
        assert stated >= epsilon_of(book.spent(run), 1e-4, "rdp")


# --- D-S3: while it runs


SEEN: list[int] = []
"""Steps in which `Watching` compared; not an attribute, because attributes are restored in each step."""


class Watching(Classifier):
    """Compares the file with the ledger in each step."""

    def __init__(self, directory: Path, *, until: int = 10**9) -> None:
        super().__init__(numbers(200))
        self.directory, self.until = directory, until
        SEEN.clear()

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        looks = global_step % 4 == 1 and (self.directory / "privacy-ledger.jsonl").exists()
        if looks and on_disk(self.directory).status == "running":
            check_bound(self.directory)
            SEEN.append(global_step)
        if global_step > self.until:
            raise ArithmeticError("broken off")
        return super().train_step(global_step, batch, device)


def test_the_file_states_all_planned_steps_while_training_runs(tmp_path: Path) -> None:
    module = Watching(tmp_path)
    statement = trained(tmp_path, module, train_batch_size=4)
    assert len(SEEN) > 10
    assert (on_disk(tmp_path), statement.status, statement.steps) == (statement, None, 50)

    module = Watching(tmp_path, until=57)
    with pytest.raises(ArithmeticError):
        trained(tmp_path, module, train_batch_size=4, epochs=2, resume=True)
    running = on_disk(tmp_path)
    assert (running.status, running.steps) == ("running", 100)
    assert running.epsilon == epsilon_of([(1.0, 4 / 200, 100)], 1e-4, "rdp")
    assert "Status: running; figures count all planned steps" in running.text
    assert "at most 100 until the planned end, 100 planned" in running.text
    check_bound(tmp_path)


def files_of(directory: Path) -> dict[str, bytes]:
    names = ("privacy_statement.txt", "privacy_statement.json", "privacy-ledger.jsonl")
    return {name: (directory / name).read_bytes() for name in names}


LONGER = {"epochs": 3, "resume": True}


def test_a_start_without_budget_changes_neither_statement_nor_ledger(tmp_path: Path) -> None:
    first = trained(tmp_path, args=promise(target_epsilon=3.0))
    before = files_of(tmp_path)
    with pytest.raises(PrivacyBudgetError, match=r"exceed target_epsilon=3\.0.* a larger target_epsilon") as caught:
        trained(tmp_path, args=promise(target_epsilon=3.0, allow_plan_change=True), **LONGER)
    assert files_of(tmp_path) == before

    kept = float(str(caught.value).split("noise_multiplier=")[1].split(" ")[0])
    longer = trained(tmp_path, args=promise(noise_multiplier=kept, max_epsilon=6.0), **LONGER)
    assert [entry[0] for entry in longer.history] == [first.history[0][0]]
    assert longer.steps == 18


class Unvalidated(Classifier):
    """Has data to validate, and no `val_step`."""

    val_step = ts.ModuleInterface.val_step


def test_a_refused_start_changes_neither_statement_nor_ledger(tmp_path: Path) -> None:
    args = promise(**NOISY, public_validation=True)
    trained(tmp_path, args=args)
    before = files_of(tmp_path)
    with pytest.raises(ts.ModuleContractError, match="val_step"):
        trained(tmp_path, Unvalidated(validate=True), args, **LONGER)
    assert files_of(tmp_path) == before


def test_the_statement_is_updated_when_others_charge_the_run(tmp_path: Path) -> None:
    class Joined(Watching):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if global_step == 18:
                book = SpendLedger(self.directory / "privacy-ledger.jsonl")
                for _ in range(160):
                    book.charge(next(iter(book.runs())), 1.0, 4 / 200, "0.5 (flat)")
            if global_step < 18 or global_step > 33:
                return super().train_step(global_step, batch, device)
            return Classifier.train_step(self, global_step, batch, device)

    statement = trained(tmp_path, Joined(tmp_path), train_batch_size=4)
    assert statement.steps == 210
    check_bound(tmp_path)


def test_the_statement_is_a_bound_after_any_ledger_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments, append = random.Random(3), ledger.LedgerChain.append

    class Killed(BaseException):
        """Nothing catches it as an error of the library."""

    def dies(chain: Any, make: Any) -> None:
        append(chain, make)
        if moments.random() < 0.3:
            raise Killed

    for _ in range(4):
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(ledger.LedgerChain, "append", dies)
            trained(tmp_path, Classifier(numbers(200)), train_batch_size=4, epochs=4, resume="auto")
        check_bound(tmp_path)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_statement_of_a_killed_run_is_a_bound(tmp_path: Path) -> None:
    moments = random.Random(5)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                trained(tmp_path, Classifier(numbers(200)), train_batch_size=4, epochs=10**3, resume="auto")
            os._exit(1)
        deadline = time.monotonic() + patience(30)
        while not (tmp_path / "privacy-ledger.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(moments.uniform(0.0, 0.5))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        check_bound(tmp_path)


# --- D-S4: initial weights


def test_weights_trained_without_privacy_are_refused_unless_public(tmp_path: Path) -> None:
    plain = ts.Trainer(Classifier(), arguments(tmp_path / "plain", checkpointer_args=SAVING))
    plain.train()
    plain.export(tmp_path / "export")
    changes = {"init_weights_from": str(tmp_path / "export")}
    with pytest.raises(PrivacyError, match=r"without a guarantee, of backend 'sp'.*init_weights_are_public=True"):
        trained(tmp_path / "refused", **changes)
    public = promise(**NOISY, init_weights_are_public=True)
    statement = trained(tmp_path / "public", None, public, **changes)
    assert "declared public by init_weights_are_public" in statement.text
    assert statement.steps == 6

    bare = tmp_path / "bare.safetensors"
    shutil.copy(tmp_path / "export" / "model.safetensors", bare)
    statement = trained(tmp_path / "bare", None, None, init_weights_from=str(bare))
    assert f"Initial weights: {bare}, a file without a record of its training" in statement.text


def test_the_steps_of_a_private_source_count(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    first.train()
    first.export(tmp_path / "export")
    changes = {"init_weights_from": str(tmp_path / "export")}
    for resumed in (False, True):
        statement = trained(tmp_path / "second", epochs=1 + resumed, resume=resumed, **changes)
        assert statement.epsilon == epsilon_of([(1.0, 8 / 41, 12 + 6 * resumed)], 1e-4, "rdp")
        assert "whose 6 private steps are among those of this statement" in statement.text


def test_a_second_private_run_adds_the_steps_of_the_first(tmp_path: Path) -> None:
    module = Classifier()
    trained(tmp_path / "one", module)
    second = trained(tmp_path / "two", module)
    assert second.epsilon == epsilon_of([(1.0, 8 / 41, 12)], 1e-4, "rdp")
    assert "those of a run before in this process, of 6 private steps" in second.text
    third = trained(tmp_path / "three", module, promise(**NOISY, init_weights_are_public=True))
    assert third.steps == 6
    assert trained(tmp_path / "four").steps == 6  # another module


def test_a_module_that_was_trained_without_privacy_is_refused(tmp_path: Path) -> None:
    module = Classifier()
    ts.Trainer(module, arguments(tmp_path / "plain")).train()
    with pytest.raises(PrivacyError, match="the module was trained without a guarantee, by another Trainer"):
        trained(tmp_path / "refused", module)
    reported = trained(tmp_path / "reported", module, promise(**NOISY, on_unsafe="report"))
    assert reported.text.startswith("NOT PRIVATE: the initial weights were trained without privacy")


# --- D-M3 and D-M14: assumptions of the epsilon


def test_another_clipping_after_a_resume_is_stated_for_its_steps(tmp_path: Path) -> None:
    trained(tmp_path)
    statement = trained(tmp_path, None, promise(**NOISY, per_sample_max_grad_norm=10.0), epochs=2, resume=True)
    assert "gradient clipped to 0.5 (flat) for 6 steps, 10 (flat) for 6 steps" in statement.text
    assert statement.epsilon == epsilon_of([(1.0, 8 / 41, 12)], 1e-4, "rdp")


def test_the_statement_has_a_line_for_each_assumption(tmp_path: Path) -> None:
    text = trained(tmp_path).text
    for line in ("Initial weights: ", "Losses: ", "Assumed: ", "Schedulers: ", "Randomness: ", "Persons: "):
        assert f"\n  {line}" in text
    assert "\n    - the gradient mode, errors, warnings and times, which depend on private records\n" in text


def test_an_export_contains_the_statement(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run")
    trainer.train()
    trainer.export(tmp_path / "export")
    readme = (tmp_path / "export" / "README.md").read_text()
    assert f"## Privacy statement\n\n```text\n{trainer.privacy_statement().text}\n```" in readme
    assert json.loads((tmp_path / "export" / "MANIFEST.json").read_text())


# --- one ledger for a dataset


def test_runs_on_a_dataset_share_its_ledger_and_its_budget(tmp_path: Path) -> None:
    limit = epsilon_of([(1.0, 8 / 41, 16)], 1e-4, "rdp") * (1 + 1e-9)
    args = promise(**NOISY, ledger=tmp_path / "data.ledger", ledger_budget=limit, dataset_name="patients")
    first = trained(tmp_path / "one", None, args)
    assert (first.steps, first.ledger_epsilon) == (6, first.epsilon)
    assert not (tmp_path / "one" / "privacy-ledger.jsonl").exists()
    tried = trained(tmp_path / "one", None, args, fast_dev_run=2)  # a dev run is a use of the data, too
    assert (tried.steps, tried.ledger_epsilon) == (2, epsilon_of([(1.0, 8 / 41, 8)], 1e-4, "rdp"))
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    branches = [trained(tmp_path / name, None, args, epochs=2, resume=True) for name in ("one", "copy")]
    assert [branch.steps for branch in branches] == [12, 14]  # of one run, which the budget has stopped
    assert branches[1].ledger_epsilon == pytest.approx(limit)
    assert "16 steps of 2 runs on the dataset patients" in branches[1].text
    with pytest.raises(PrivacyBudgetError, match="budget of the privacy ledger"):
        trained(tmp_path / "third", None, args)
    with pytest.raises(PrivacyLedgerError, match="that of the dataset patients with 41 records"):
        trained(tmp_path / "other", Classifier(numbers(50)), promise(**NOISY, ledger=tmp_path / "data.ledger"))


def test_the_remaining_files_of_a_partly_deleted_run_count(tmp_path: Path) -> None:
    args = promise(**NOISY, ledger=tmp_path / "data.ledger")
    module = BreaksOff(5, numbers(149))
    with pytest.raises(ArithmeticError):
        trained(tmp_path / "run", module, args, train_batch_size=20, resume="auto")
    shutil.rmtree(tmp_path / "run")
    assert trained(tmp_path / "run", Classifier(numbers(149)), args, train_batch_size=20, resume="auto").steps >= 5 + 8


def test_statements_of_copied_runs_name_the_other_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    other = trained(tmp_path / "other", epochs=2, resume=True)
    assert "Copied at step 6 from " in caplog.text
    one = trained(tmp_path / "one", epochs=2, resume=True)
    assert f"Copies: Copied at step 6 from {tmp_path / 'one'}" in other.text
    assert f"Copies: Copied at step 6 to {tmp_path / 'other'}" in one.text


def test_the_statement_names_the_steps_of_an_overwritten_run(tmp_path: Path) -> None:
    assert "Other runs" not in trained(tmp_path).text
    again = trained(tmp_path, overwrite=True)
    words = "Other runs: 6 steps of other runs in this ledger are not included; on the same data, their epsilons add up"
    assert words in again.text
    assert words in (tmp_path / "privacy_statement.txt").read_text()
    assert current_statement(tmp_path).text.count(words) == 1


def test_the_refusal_of_a_second_run_says_epsilons_add_up(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(ts.ConfigurationError, match=r"overwrite=True.* epsilon of that run stays spent and adds up"):
        trained(tmp_path)


# --- on the command line


def test_the_command_line_prints_the_current_statement_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, Classifier(numbers(200)), train_batch_size=4)
    with pytest.raises(ArithmeticError):
        trained(tmp_path, BreaksOff(57, numbers(200)), train_batch_size=4, epochs=2, resume=True)
    capsys.readouterr()
    assert main(["privacy", "statement", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    recorded = SpendLedger(tmp_path / "privacy-ledger.jsonl")
    (run,) = recorded.runs()
    assert sum(entry[2] for entry in told["history"]) == recorded.runs()[run] >= 57
    assert told["epsilon"] == epsilon_of(recorded.spent(run), 1e-4, "rdp")
    assert main(["privacy", "statement", str(tmp_path)]) == 0
    assert "-differentially private for one item" in capsys.readouterr().out
    assert main(["privacy", "statement", str(tmp_path / "checkpoints")]) == 0
    assert main(["privacy", "statement", str(tmp_path / "nothing")]) == 2


def test_the_command_line_prints_the_account_of_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.ledger"
    args = promise(**NOISY, ledger=path, dataset_name="patients")
    for name in ("one", "two"):
        trained(tmp_path / name, None, args)
    capsys.readouterr()
    words = ["privacy", "ledger", str(path), "--accountant", "rdp"]
    assert main([*words, "--delta", "1e-4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["epsilon"] == epsilon_of([(1.0, 8 / 41, 12)], 1e-4, "rdp")
    assert [(one["steps"], Path(one["folder"]).name) for one in told["runs"]] == [(6, "two"), (6, "one")]
    assert main(words) == 2
    assert "At which delta?" in capsys.readouterr().err
    assert main([*words, "--delta", "1e-4", "--budget", "3"]) == 0
    assert "12 steps of 2 runs on the dataset patients" in capsys.readouterr().out
    assert main(words) == 0  # at the delta of the budget
    capsys.readouterr()
    best = ["--mean-runs", "10", "--noise-multiplier", "2", "--sample-rate", "0.02", "--steps", "500"]
    assert main(["privacy", "best-of", *best, "--delta", "1e-5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["one_run"] < found["epsilon"] < found["all_released"]
    best[1] = "9.5"
    assert main(["privacy", "best-of", *best, "--delta", "1e-5"]) == 0
    assert "all runs released, if they are 10:" in capsys.readouterr().out


# --- facts other than the steps, in the file and on the command line


class Killed(BaseException):
    """Nothing catches it as an error of the library."""


class Scripted(ts.Callback):
    """Calls a function after a global step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_train_step_end(self, trainer: ts.Trainer, step: int) -> None:
        if step == self.step:
            self.action(trainer)


def dies(trainer: ts.Trainer) -> None:
    raise Killed


def writes(trainer: ts.Trainer) -> None:
    next(trainer.module.parameters()).data.add_(0.1)


def killed(directory: Path, step: int, *more: Scripted, args: Any = None, **changes: Any) -> None:
    """Train until the end of global step `step`, then raise without a checkpoint."""
    trainer = ts.Trainer(
        Classifier(),
        private(directory, args or promise(**NOISY), **{"checkpointer_args": RARELY, "epochs": 2, **changes}),
        callbacks=[*more, Scripted(step, dies)],
    )
    with pytest.raises(Killed):
        trainer.train()


def test_a_refusal_within_a_run_is_written_at_once(tmp_path: Path) -> None:
    args = promise(**NOISY, on_unsafe="report")
    killed(tmp_path, 5, Scripted(2, writes), args=args)
    assert on_disk(tmp_path).overrides
    assert current_statement(tmp_path).epsilon is None
    book = SpendLedger(tmp_path / "privacy-ledger.jsonl")
    (run,) = book.runs()
    assert book.voided[run] in (tmp_path / "privacy_statement.txt").read_text()


def test_overrides_after_the_last_checkpoint_are_stated(tmp_path: Path) -> None:
    trained(tmp_path, epochs=1)
    killed(tmp_path, 8, args=promise(**NOISY, expose_records=True, log_train_loss=True), resume=True)
    told = current_statement(tmp_path)
    assert (told.epsilon, told.delta, told.covered) == (None, None, ())
    assert any("expose_records" in reason for reason in told.overrides)
    resumed = trained(tmp_path, epochs=2, resume=True)  # from the checkpoint, which has no record of them
    assert resumed.epsilon is None
    assert any("recorded without noise" in line for line in resumed.not_covered)


def test_without_its_ledger_a_run_states_the_planned_epsilon(tmp_path: Path) -> None:
    killed(tmp_path, 5)
    running, path = on_disk(tmp_path), tmp_path / "privacy-ledger.jsonl"
    for _ in range(2):
        path.unlink(missing_ok=True)
        told = current_statement(tmp_path)
        assert (told.steps, told.epsilon, told.status) == (12, running.epsilon, "running")
        path.touch()


def test_a_run_with_a_later_ledger_is_counted_there(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "data.ledger"
    trained(run, epochs=1)
    args = promise(**NOISY, ledger=path)
    killed(run, 9, args=args, resume=True)
    assert current_statement(run).steps >= 9
    with pytest.raises(PrivacyLedgerError, match=r"charges .*data.ledger since"):
        trained(run, epochs=2, resume=True)
    assert trained(run, None, args, epochs=2, resume=True).steps >= 12 + 3
    path.unlink()
    with pytest.raises(PrivacyLedgerError, match="does not know the run"):
        current_statement(run)


def test_the_planned_steps_of_an_early_stop_keep_counting(tmp_path: Path) -> None:
    def stops(trainer: ts.Trainer) -> None:
        trainer.request_stop("enough")

    ts.Trainer(
        Classifier(),
        private(tmp_path, promise(**NOISY), checkpointer_args=SAVING, epochs=2),
        callbacks=[Scripted(5, stops)],
    ).train()
    assert (on_disk(tmp_path).steps, current_statement(tmp_path).steps) == (12, 12)
    killed(tmp_path, 7, resume=True, epochs=2)
    assert current_statement(tmp_path).steps == 12
    assert trained(tmp_path, epochs=2, resume=True).steps >= 12


def test_with_telemetry_every_early_end_counts_as_chosen(tmp_path: Path) -> None:
    args = promise(**NOISY, telemetry={"loss": (0, 2)})
    killed(tmp_path, 5, args=args)  # an exception, which the library sees
    assert current_statement(tmp_path).steps == 12
    killed(tmp_path / "plain", 5)
    counts = [
        sum(entry[2] for entry in SpendLedger(place / "privacy-ledger.jsonl").unused())
        for place in (tmp_path, tmp_path / "plain")
    ]
    assert counts == [7, 0]


def test_an_export_that_a_private_run_loads_counts_as_origin(tmp_path: Path) -> None:
    plain = ts.Trainer(Classifier(), arguments(tmp_path / "plain", checkpointer_args=RARELY))
    plain.train()
    plain.export(tmp_path / "export")
    with pytest.raises(PrivacyError, match="without a guarantee"):
        made(tmp_path / "run").load_export(tmp_path / "export")
    first = made(tmp_path / "first")
    first.train()
    first.export(tmp_path / "private")
    assert current_statement(tmp_path / "private").steps == 6
    assert current_statement(tmp_path / "private").text == first.privacy_statement().text
    with pytest.raises(CheckpointNotFoundError, match="not private"):
        current_statement(tmp_path / "export")
    second = made(tmp_path / "second")
    second.load_export(tmp_path / "private")
    second.train()
    assert second.privacy_statement().steps == 12
    second.export(tmp_path / "own")
    second.load_export(tmp_path / "own")
    assert second.privacy_statement().steps == 12


def test_a_ledger_takes_no_budget_without_a_meaning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = SpendLedger(tmp_path / "data.ledger")
    book.charge("run", 1.0, 0.1)
    book._append(lambda: [{"budget": [3.0, 5.0]}])  # of an earlier version
    assert SpendLedger(book.path).spent()
    for delta in ("5", "nan", "0"):
        assert main(["privacy", "ledger", book.path, "--budget", "3", "--delta", delta]) == 2
    assert "write a number between 0 and 1" in capsys.readouterr().err
    book.runs()
    assert book.budget is None


def test_a_link_to_a_ledger_is_not_a_copy(tmp_path: Path) -> None:
    path, link = tmp_path / "one" / "a.ledger", tmp_path / "two" / "a.ledger"
    SpendLedger(path).charge("run", 1.0, 0.1)
    link.parent.mkdir()
    os.link(path, link)
    for place in (link, path, link):
        book = SpendLedger(place)
        for _ in range(20):
            book.charge("run", 1.0, 0.1)
    assert (book.copies(), SpendLedger(path).copies()) == ([], [])


def test_times_and_memory_are_recorded_and_decide_nothing(tmp_path: Path) -> None:
    trainer = ts.Trainer(Classifier(), private(tmp_path, promise(**NOISY), log_every=1), callbacks=[MemoryMonitor()])
    trainer.train()
    guard = trainer.history.guard
    assert guard is not None
    assert "memory/host_peak" in trainer.history.get_metric_names()
    with pytest.raises(PrivacyError, match="depend on the sizes of samples"):
        guard.require("memory/host_peak", "EarlyStopping")


# --- values without noise


class Keeps(Classifier):
    """Logs in its validation the loss of the last record that was trained."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        self.last = loss.detach()
        return loss

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str) -> None:
        self.log("mine", self.last)


def test_a_validation_logs_no_value_kept_by_train_step(tmp_path: Path) -> None:
    args = promise(**NOISY, public_validation=True, grad_mode="loop")
    trainer = ts.Trainer(Keeps(validate=True), private(tmp_path, args))
    trainer.train()
    assert trainer.history.guard is not None
    assert "mine" in trainer.history.guard.hidden
    assert "mine" not in trainer.history.get_metric_names()


def test_training_data_are_refused_as_public_validation_data(tmp_path: Path) -> None:
    module = Classifier()
    trainer = ts.Trainer(module, private(tmp_path, promise(**NOISY, public_validation=True)))
    trainer.train()
    loader = DataLoader(Subset(module.dataset, [0, 1, 2]), batch_size=1)
    with pytest.raises(PrivacyError, match="reads records of the training data set"):
        trainer.validate({"train": loader})


def test_earlier_states_report_public_random_numbers_and_drop_losses(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    trainer.train()
    layer = next(one for one in trainer.trainer_backend.layers() if one.private)
    state = layer.get_layer_state()
    assert state is not None
    del state["format"]
    layer.update_layer_state(state)
    told = trainer.privacy_statement().not_covered
    assert any("in the first 6 steps, of an earlier version" in line for line in told)

    old = RunHistory()
    for name in ("train/loss", "val/loss", "train/loss"):
        old.update_metric(name, 1.0, step=3)
    history = RunHistory()
    history.guard = MetricGuard(released=("loss",))
    history.update_state(old.get_state())
    assert history.get_metric_names() == {"val/loss"}
    assert history.get_metric_values("val/loss") == [1.0]
    history.update_metric("train/loss", 2.0, provenance=Provenance.COVERED)
    assert history.guard.may_decide("train/loss")
