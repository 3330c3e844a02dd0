"""The table of changes at a resume, its effects, its record, and `strict_resume`."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train
from trainstack.checkpointing.directory import read_manifest
from trainstack.trainer.core.changes import Change, changes_between, table_of
from trainstack.trainer.core.effects import ARGUMENTS, Effect, effect_of
from trainstack.trainer.start_description import describe_arguments
from trainstack.trainer.tracking.resume_log import FILE_NAME, append_resume, read_resumes

SAVING: dict[str, Any] = {"checkpointer_args": ts.DefaultCheckpointerArguments(), "log_level": "INFO"}


@pytest.fixture(autouse=True)
def _messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainstack")


def test_each_argument_has_an_effect() -> None:
    assert set(ARGUMENTS) == {field.name for field in dataclasses.fields(ts.TrainerArguments)}


def test_arguments_that_are_not_compared_are_not_described(tmp_path: Path) -> None:
    described = describe_arguments(ts.TrainerArguments(output_dir=tmp_path), "sp")

    compared = {name for name, effect in ARGUMENTS.items() if effect is not None} - {"float32_matmul_precision"}
    assert {name.partition(".")[0] for name in described} == compared
    assert str(tmp_path) not in repr(described)


@pytest.mark.parametrize(
    ("name", "values", "effect"),
    [
        ("arguments.writers", ("a", "b"), Effect.SAME_BITS),
        ("arguments.epochs", ("1", "2"), Effect.DEPENDS),
        ("arguments.max_grad_norm", ("1.0", "2.0"), Effect.OTHER_RUN),
        ("arguments.compile", ("False", "True"), Effect.OTHER_BITS),
        ("arguments.backend", ("'sp'", "'ddp'"), Effect.OTHER_BITS),
        ("arguments.backend", ("'sp'", "'ddp-bf16'"), Effect.OTHER_RUN),
        ("arguments.backend_options.ddp.static_graph", ("False", "True"), Effect.OTHER_BITS),
        ("arguments.backend_options.amp.init_scale", ("1.0", "2.0"), Effect.OTHER_RUN),
        ("arguments.of_a_newer_version", ("1", "2"), Effect.OTHER_RUN),
        ("environment.torch", ("2.12", "2.13"), Effect.OTHER_BITS),
        ("environment.world size", ("1", "2"), Effect.OTHER_BITS),
        ("data.global batch", ("8", "16"), Effect.OTHER_RUN),
        ("data.micro-batch", ("8", "4"), Effect.OTHER_BITS),
        ("code.Line.train_step", ("a", "b"), Effect.OTHER_RUN),
    ],
)
def test_a_change_has_the_documented_effect(name: str, values: tuple[str, str], effect: Effect) -> None:
    assert effect_of(name, *values) is effect


def test_a_missing_section_does_not_count_as_a_change() -> None:
    saved = {"arguments.max_grad_norm": "1.0", "environment.torch": "2.13"}

    assert changes_between(saved, {"environment.torch": "2.13"}) == []
    [change] = changes_between(saved, {"environment.torch": "2.13", "environment.cuda": "13"})
    assert (change.name, change.saved, change.given) == ("environment.cuda", "-", "13")


def test_code_is_not_compared_between_versions_of_python() -> None:
    saved = {"environment.python": "3.11.7", "code.Line.train_step": "a"}

    assert [c.name for c in changes_between(saved, {**saved, "code.Line.train_step": "b"})] == ["code.Line.train_step"]
    newer = {"environment.python": "3.12.1", "code.Line.train_step": "b"}
    assert [c.name for c in changes_between(saved, newer)] == ["environment.python"]


def test_a_table_shows_five_changed_methods_at_most() -> None:
    code = [Change(name=f"code.f{i}", saved="a", given="b", effect=Effect.OTHER_RUN) for i in range(9)]

    lines = table_of(code).splitlines()
    assert len(lines) == 1 + 5 + 1
    assert lines[-1].startswith("  code: 4 more ")


class Lines:
    """Compiles a module class from text, as from an edited file."""

    @staticmethod
    def compiled(body: str) -> type[ts.ModuleInterface]:
        names: dict[str, Any] = {"Classifier": Classifier, "__name__": "a_users_module"}
        exec(f"class Line(Classifier):\n{body}", names)
        made: type[ts.ModuleInterface] = names["Line"]
        return made


STEP = """    def train_step(self, global_step, batch, device):
        return Classifier.train_step(self, global_step, batch, device)"""
COMMENTED = STEP.replace("\n", "\n\n        # a comment\n")
SCALED = f"{STEP} * 2"


def resumed(folder: Path, module: ts.ModuleInterface, **changes: Any) -> ts.Trainer:
    return train(module, folder, **{"epochs": 2, "resume": True, **SAVING, **changes})


def test_a_resume_without_changes_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(Lines.compiled(STEP)(), tmp_path, epochs=2, **SAVING)
    resumed(tmp_path, Lines.compiled(COMMENTED)(), strict_resume=True)

    assert "nothing has changed since the checkpoint at global step 12 was written." in caplog.messages
    assert not (tmp_path / FILE_NAME).exists()


def edited_versions(folder: Path, name: str, text: str) -> Path:
    """A copy of the newest checkpoint whose description names another environment."""
    newest = ts.list_checkpoints(folder / "checkpoints")[0]
    checkpoint = ts.read_checkpoint(newest.path)
    assert checkpoint.metadata is not None
    checkpoint.metadata["start"]["environment"][name] = text
    ts.write_checkpoint(checkpoint, folder / "edited", newest.name)
    return folder / "edited" / newest.name


@pytest.mark.parametrize(
    ("module", "changes", "rows", "remedy"),
    [
        (
            Classifier,
            {"max_grad_norm": 2.0},
            [("arguments.max_grad_norm", "1.0", "2.0", "another run")],
            "write max_grad_norm=1.0",
        ),
        (Classifier, {"seed": 3}, [("arguments.seed", "0", "3", "none: the saved value is used")], "write seed=0"),
        (
            Classifier,
            {"gpu_batch_size_limit": 4},
            [("data.micro-batch", "8", "4", "same samples, other bits")],
            "keep train_batch_size, gpu_batch_size_limit",
        ),
        (
            Classifier,
            {"reset_optimizers_schedulers": True},
            [("optimizers", "as saved", "new", "another run")],
            "remove reset_optimizers_schedulers",
        ),
        (
            lambda: Classifier(lr=0.2),
            {},
            [("optimizers.0.lr", "0.1", "0.2", "none: the saved value is used")],
            "make it with lr=0.1",
        ),
    ],
)
def test_strict_resume_names_each_change_and_its_remedy(
    module: Callable[[], ts.ModuleInterface],
    changes: dict[str, Any],
    rows: list[tuple[str, ...]],
    remedy: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(Classifier(), tmp_path, **SAVING)
    with pytest.raises(ts.CheckpointMismatchError, match=re.escape(f"To continue exactly: {remedy}")) as refused:
        resumed(tmp_path, module(), strict_resume=True, **changes)
    for name, saved, given, effect in rows:
        assert f"{name} was {saved} and is {given} ({effect})" in str(refused.value)

    resumed(tmp_path, module(), **changes)
    for row in rows:
        assert re.search(" +".join(map(re.escape, row)), caplog.text)
    kept = [(c.name, c.saved, c.given, c.effect.value) for one in read_resumes(tmp_path) for c in one.changes]
    assert [row for row in kept if row[0] != "arguments.epochs"] == rows


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("torch", "1.0", "install torch 1.0"),
        ("python", "3.1.0", "install python 3.1.0"),
        ("device", "cuda", "resume on a machine of the same kind"),
        ("cpu threads", "64", "set OMP_NUM_THREADS=64"),
    ],
)
def test_another_environment_is_refused_with_a_remedy(name: str, text: str, remedy: str, tmp_path: Path) -> None:
    train(Classifier(), tmp_path / "run", **SAVING)
    path = edited_versions(tmp_path / "run", name, text)

    with pytest.raises(ts.CheckpointMismatchError, match=rf"environment\.{name} was {text} and is .*{remedy}"):
        resumed(tmp_path / "strict", Classifier(), resume=str(path), strict_resume=True)


def test_a_fitted_micro_batch_is_not_a_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(Classifier(), tmp_path, epochs=1, gpu_batch_size_limit=4, **SAVING)
    resumed(tmp_path, Classifier(), fit_micro_batch=True, max_grad_norm=0.5)

    assert "arguments.max_grad_norm" in caplog.text
    assert "data.micro-batch" not in caplog.text


def test_edited_code_is_named_by_its_method(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(Lines.compiled(STEP)(), tmp_path, **SAVING)
    resumed(tmp_path, Lines.compiled(SCALED)())

    assert re.search(r"code\.Line\.train_step +\w{16} +\w{16} +another run", caplog.text)
    assert caplog.text.count("  code.") == 1


def test_a_change_that_keeps_the_bits_is_not_refused(tmp_path: Path) -> None:
    train(Classifier(), tmp_path, **SAVING)

    resumed(tmp_path, Classifier(), strict_resume=True, log_every=3, handle_signals=False)
    [resume] = read_resumes(tmp_path)
    assert resume.global_step == 6
    assert {c.name: c.effect for c in resume.changes} == {
        "arguments.epochs": Effect.DEPENDS,
        "arguments.log_every": Effect.DEPENDS,
        "arguments.handle_signals": Effect.SAME_BITS,
    }


class Cut(Classifier):
    stops = True

    def on_end_train_step(self, global_step: int) -> None:
        if global_step == 3 and self.stops:
            raise KeyboardInterrupt


def test_strict_resume_refuses_other_samples_within_an_epoch(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=2)
    with pytest.raises(KeyboardInterrupt):
        train(Cut(), tmp_path, checkpointer_args=saving)
    other = Cut(numbers(41))
    other.dataset.tensors[0][20] += 1
    other.stops = False

    with pytest.raises(ts.CheckpointMismatchError, match=r"data\.sample 20 was \w+ and is \w+ \(another run\)"):
        resumed(tmp_path, other, epochs=1, checkpointer_args=saving, strict_resume=True)


def test_overwriting_a_run_deletes_its_record_of_resumes(tmp_path: Path) -> None:
    train(Classifier(), tmp_path, **SAVING)
    resumed(tmp_path, Classifier())
    assert (tmp_path / FILE_NAME).exists()

    train(Classifier(), tmp_path, overwrite=True, **SAVING)
    assert not (tmp_path / FILE_NAME).exists()


def test_an_incomplete_line_of_the_record_is_ignored(tmp_path: Path) -> None:
    change = Change(name="arguments.seed", saved="0", given="1", effect=Effect.OTHER_RUN)
    append_resume(tmp_path, 3, [change])
    with open(tmp_path / FILE_NAME, "ab") as file:
        file.write(b'{"global_step": 4, "changes": [{"na')
    append_resume(tmp_path, 5, [change])

    assert [(one.global_step, one.changes) for one in read_resumes(tmp_path)] == [(3, (change,)), (5, (change,))]


@pytest.mark.slow
def test_a_private_runs_description_is_independent_of_its_records(tmp_path: Path) -> None:
    described = []
    for count in (41, 50):
        folder = tmp_path / str(count)
        train(Classifier(numbers(count)), folder, backend="sp-dp", **SAVING)
        start = read_manifest(ts.list_checkpoints(folder / "checkpoints")[0].path).metadata["start"]
        described.append(json.dumps(start))

    assert described[0] == described[1]
    assert "length" not in described[0]
