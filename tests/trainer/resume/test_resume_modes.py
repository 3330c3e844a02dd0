"""The states that a run takes from a checkpoint, and from weights without one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train, weights
from trainstack.backends.spec import unregister
from trainstack.checkpointing import manifest

SAVING = ts.DefaultCheckpointerArguments(keep_last=None)
NOT_SAVING = ts.DefaultCheckpointerArguments(checkpoint=False)


@pytest.fixture
def first(tmp_path: Path) -> ts.Trainer:
    """Two epochs of AdamW with a schedule, under sp-amp; the newest checkpoint is at step 12."""
    module = Classifier(optimizer=torch.optim.AdamW, scheduler=True)
    options = {"amp": {"init_scale": 64.0}}
    return train(module, tmp_path, epochs=2, backend="sp-amp", backend_options=options, checkpointer_args=SAVING)


def resumed(directory: Path, **changes: Any) -> ts.Trainer:
    """A trainer that has loaded the newest checkpoint, and has not trained."""
    values = {"backend": "sp-amp", "epochs": 3, "seed": 5, "resume": str(directory / "checkpoints")}
    module = Classifier(optimizer=torch.optim.AdamW, scheduler=True, seed=7)
    trainer = ts.Trainer(module, arguments(directory / "other", **{**values, **changes}))
    assert trainer.plan is not None
    return trainer


class TestModes:
    @pytest.mark.spec("FN-32")
    def test_full_keeps_everything(self, first: ts.Trainer, tmp_path: Path) -> None:
        trainer = resumed(tmp_path)
        state = trainer.get_state()

        assert torch.equal(weights(trainer.module), weights(first.module))
        assert (trainer.global_steps_finished, trainer.state.epoch, trainer.state.seed) == (12, 2, 0)
        assert next(iter(state["optimizers"][0]["state"].values()))["step"] == 12
        assert state["schedulers"][0]["state"]["last_epoch"] == 12
        assert trainer.trainer_backend.get_state()["amp"]["scale"] == 64.0
        assert trainer.history.get_metric_names() == first.history.get_metric_names()

    @pytest.mark.spec("FN-32")
    def test_weights_and_optimizer_begin_a_new_run(
        self, first: ts.Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer = resumed(tmp_path, resume_mode="weights_and_optimizer")
        state = trainer.get_state()

        assert torch.equal(weights(trainer.module), weights(first.module))
        assert (trainer.global_steps_finished, trainer.state.epoch, trainer.state.seed) == (0, 0, 5)
        assert next(iter(state["optimizers"][0]["state"].values()))["step"] == 12
        assert state["schedulers"][0]["state"]["last_epoch"] == 12
        assert trainer.trainer_backend.get_state()["amp"]["scale"] == 64.0
        assert not trainer.history.get_metric_names()
        assert "loaded weights, optimizers, schedulers and layers of the checkpoint at global step 12" in caplog.text

    @pytest.mark.spec("FN-32", "PA-23")
    def test_weights_alone_begin_a_new_run(self, first: ts.Trainer, tmp_path: Path) -> None:
        trainer = resumed(tmp_path, resume_mode="weights")
        state = trainer.get_state()

        assert torch.equal(weights(trainer.module), weights(first.module))
        assert (trainer.global_steps_finished, trainer.state.epoch, trainer.state.seed) == (0, 0, 5)
        assert state["optimizers"][0]["state"] == {}
        assert state["schedulers"][0]["state"]["last_epoch"] == 0
        assert trainer.trainer_backend.get_state()["amp"]["scale"] == 65536.0
        assert not trainer.history.get_metric_names()

    @pytest.mark.parametrize("mode", ["weights", "weights_and_optimizer"])
    def test_the_new_run_trains_all_its_epochs_and_saves_them(
        self, mode: str, first: ts.Trainer, tmp_path: Path
    ) -> None:
        trainer = resumed(tmp_path, resume_mode=mode, checkpointer_args=SAVING)
        trainer.train()

        found = ts.list_checkpoints(tmp_path / "other" / "checkpoints")
        assert trainer.global_steps_finished == 18
        assert [info.global_step for info in found if info.kind == "checkpoint"] == [6, 12, 18]

    @pytest.mark.usefixtures("first")
    def test_weights_are_loaded_under_any_backend(self, tmp_path: Path) -> None:
        for backend in ("sp", "sp-bf16"):
            assert resumed(tmp_path, resume_mode="weights", backend=backend).global_steps_finished == 0
        with pytest.raises(ts.CheckpointMismatchError, match=r"backend 'sp': .*\['amp'\].*resume_mode='weights'"):
            resumed(tmp_path, resume_mode="weights_and_optimizer", backend="sp")

    def test_contradictory_arguments_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ts.ConfigurationError, match=r"resume_mode='weight': write one of 'full', "):
            arguments(tmp_path, resume_mode="weight")
        with pytest.raises(ts.ConfigurationError, match=r"contradict each other\. Write resume_mode='weights'"):
            arguments(tmp_path, resume_mode="weights_and_optimizer", reset_optimizers_schedulers=True)


@pytest.fixture
def ledger() -> Iterator[None]:
    """A layer whose state may not be lost, such as a privacy accountant."""

    @ts.register_layer("ledger")
    class Ledger(ts.AbstractTrainerBackendDecorator):
        requires_state = True
        steps = 0

        def step(self, work: Any) -> bool:
            self.steps += 1
            return self.inner.step(work)

        def get_layer_state(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def update_layer_state(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

    yield
    unregister("ledger")


@pytest.mark.usefixtures("ledger")
class TestStateThatMustSurvive:
    def test_it_is_never_dropped(self, tmp_path: Path) -> None:
        train(Classifier(), tmp_path, backend="sp-ledger", checkpointer_args=SAVING)
        path = tmp_path / "checkpoints" / "checkpoint-000000006"

        for backend in ("sp", "sp-ledger"):
            with pytest.raises(ts.CheckpointMismatchError, match=r"'weights' would lose the state of \['ledger'\]"):
                train(Classifier(), tmp_path / "new", backend=backend, resume=path, resume_mode="weights")
            with pytest.raises(ts.CheckpointMismatchError, match=r"without the state of \['ledger'\].*write an export"):
                train(Classifier(), tmp_path / "new", backend=backend, init_weights_from=path)
            with pytest.raises(ts.CheckpointMismatchError, match=r"without the state of \['ledger'\].*write an export"):
                train(Classifier(), tmp_path / "new", backend=backend, init_weights_from=path.with_name("last"))
        with pytest.raises(ts.CheckpointMismatchError, match=r"state for \['ledger'\]"):
            train(Classifier(), tmp_path / "new", resume=path, resume_mode="weights_and_optimizer")
        kept = train(
            Classifier(), tmp_path / "new", backend="sp-ledger", resume=path, resume_mode="weights_and_optimizer"
        )
        assert kept.trainer_backend.get_state()["ledger"] == {"steps": 12}

    @pytest.mark.parametrize("backend", ["sp", "sp-ledger"])
    def test_a_weights_file_of_a_checkpoint_is_refused(self, tmp_path: Path, backend: str) -> None:
        train(Classifier(), tmp_path, backend="sp-ledger", checkpointer_args=SAVING)
        folder = tmp_path / "checkpoints" / "checkpoint-000000006"
        link = tmp_path / "weights.safetensors"
        link.symlink_to(folder / "model.safetensors")

        said = rf"is a file of a checkpoint of backend 'sp-ledger', .*\['ledger'\].* Write resume='{folder}'"
        for file in (folder / "model.safetensors", link):
            with pytest.raises(ts.CheckpointMismatchError, match=said):
                train(Classifier(), tmp_path / "new", backend=backend, init_weights_from=file)

    def test_an_export_is_accepted_without_it(self, tmp_path: Path) -> None:
        train(Classifier(), tmp_path, backend="sp-ledger", checkpointer_args=SAVING)
        (export,) = tmp_path.glob("checkpoints/checkpoint-model-*")

        for source in (export, export / "model.safetensors"):
            assert train(Classifier(), tmp_path / "new", init_weights_from=source).warm_start_report is not None


class TestWarmStart:
    @pytest.mark.spec("HZ-05")
    def test_a_run_starts_from_an_export(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        earlier = train(Classifier(), tmp_path / "a", checkpointer_args=SAVING)
        (export,) = tmp_path.glob("a/checkpoints/checkpoint-model-*")
        module = Classifier(seed=3)
        module.extra = torch.nn.Linear(2, 2)
        trainer = ts.Trainer(module, arguments(tmp_path / "b", init_weights_from=export))
        assert trainer.warm_start_report is None
        assert trainer.plan is not None

        assert trainer.warm_start_report is not None
        assert trainer.warm_start_report.missing == ("extra.weight", "extra.bias")
        assert torch.equal(module.net[3].weight, earlier.module.net[3].weight)
        assert f"loaded 4 tensors from {export}; 2 missing there keep their initial values: extra.weight" in caplog.text

    def test_a_strict_start_refuses_missing_tensors(self, tmp_path: Path) -> None:
        path = ts.export_model({"net.0.bias": torch.zeros(8)}, tmp_path / "part")
        with pytest.raises(ts.CheckpointMismatchError, match=r"does not fit Classifier completely.*net\.0\.weight"):
            train(Classifier(), tmp_path, init_weights_from=path, init_weights_strict=True)

    def test_a_resumed_checkpoint_takes_precedence(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = ts.export_model(Classifier(seed=8), tmp_path / "start")
        changes = {"init_weights_from": path, "resume": "auto", "checkpointer_args": SAVING}
        fresh = train(Classifier(seed=1), tmp_path, **changes)
        assert fresh.warm_start_report is not None
        again = train(Classifier(seed=2), tmp_path, **changes)

        assert again.warm_start_report is None
        assert torch.equal(weights(again.module), weights(fresh.module))
        assert f"init_weights_from='{path}' is not used: the run resumes from a checkpoint." in caplog.text

    def test_a_pickle_is_refused_with_the_call_to_write(self, tmp_path: Path) -> None:
        source = Classifier(seed=8)
        torch.save(source.state_dict(), tmp_path / "x.pt")
        with pytest.raises(
            ts.CheckpointMismatchError, match=r"export_model\(load_torch_weights\('.*x\.pt'\), 'weights'\)"
        ):
            train(Classifier(), tmp_path, init_weights_from=tmp_path / "x.pt")
        path = ts.export_model(ts.load_torch_weights(tmp_path / "x.pt"), tmp_path / "weights")
        trainer = ts.Trainer(Classifier(), arguments(tmp_path, init_weights_from=path, init_weights_strict=True))
        assert trainer.plan is not None
        assert torch.equal(weights(trainer.module), weights(source))

    def test_a_weights_file_in_any_folder_is_read(self, tmp_path: Path) -> None:
        train(Classifier(), tmp_path, checkpointer_args=SAVING)
        file = tmp_path / "checkpoints" / "checkpoint-000000006" / "model.safetensors"
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        for name in ("MANIFEST.json", "state.json"):
            (theirs / name).write_text("{}")
            alone = theirs / f"{name}.safetensors"
            alone.write_bytes(file.read_bytes())
            for source in (file, alone):
                assert train(Classifier(), tmp_path / "new", init_weights_from=source).warm_start_report is not None
            (theirs / name).unlink()

    def test_a_value_that_is_not_a_path_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ts.ConfigurationError, match="init_weights_from=True: write the path of"):
            arguments(tmp_path, init_weights_from=True)


class OneCycle(Classifier):
    """A schedule that cannot step beyond its end."""

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        assert self.plan is not None
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.plan.steps_per_epoch * epochs  # type: ignore[operator]
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)]


class TestMoreAndFewerEpochs:
    def test_a_schedule_that_would_end_too_early_is_refused(self, tmp_path: Path) -> None:
        train(OneCycle(), tmp_path, epochs=2, checkpointer_args=SAVING)

        with pytest.raises(
            ts.CheckpointMismatchError,
            match=r"OneCycleLR\) of the checkpoint was made for 12 steps, of which 12 are done; epochs=4 has 12 more.*"
            "reset_optimizers_schedulers=True",
        ):
            train(OneCycle(), tmp_path, epochs=4, resume=True, checkpointer_args=SAVING)
        longer = train(
            OneCycle(), tmp_path, epochs=4, resume=True, checkpointer_args=SAVING, reset_optimizers_schedulers=True
        )
        assert longer.global_steps_finished == 24
        assert longer.get_state()["schedulers"][0]["state"]["last_epoch"] == 12

    def test_a_schedule_by_epochs_is_compared_with_epochs(self, tmp_path: Path) -> None:
        class ByEpochs(Classifier):
            def get_optimizers_schedulers(self, *_: Any) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)
                return optimizer, ts.SchedulerConfig(cycle, interval="epoch")

        train(ByEpochs(), tmp_path, epochs=2, checkpointer_args=SAVING)
        longer = train(ByEpochs(), tmp_path, epochs=4, resume=True, checkpointer_args=SAVING)
        assert longer.get_state()["schedulers"][0]["state"]["last_epoch"] == 4
        with pytest.raises(ts.CheckpointMismatchError, match=r"4 steps, of which 4 are done; epochs=5 has 1 more"):
            train(ByEpochs(), tmp_path, epochs=5, resume=True, checkpointer_args=SAVING)

    def test_a_schedule_that_is_made_too_short_is_named(self, tmp_path: Path) -> None:
        class Short(Classifier):
            def get_optimizers_schedulers(self, *_: Any) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=3)]

        with pytest.raises(ts.ModuleContractError, match=r"OneCycleLR.step\(\) failed.*self\.plan\.total_steps"):
            train(Short(), tmp_path)

    def test_fewer_epochs_than_done_train_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        done = train(Classifier(), tmp_path, epochs=2, checkpointer_args=SAVING)
        again = train(Classifier(), tmp_path, epochs=1, resume=True, checkpointer_args=SAVING, writers=["stdout"])

        assert again.global_steps_finished == 12
        assert torch.equal(weights(again.module), weights(done.module))
        said = capsys.readouterr().out
        assert (
            "2 epochs are trained already, and epochs=1: nothing is left to do. To continue, write epochs=3 or" in said
        )
        assert "To start again, write resume=False or another output_dir." in said

    @pytest.mark.parametrize(
        ("first", "said"),
        [
            (
                {"epochs": 1},
                "1 epoch is trained already, and epochs=1: nothing is left to do. To continue, write epochs=2",
            ),
            (
                {"max_steps": 4},
                "4 global steps are trained already, and max_steps=4: nothing is left to do. To continue,",
            ),
            ({"epochs": 0}, "epochs=0: there is nothing to train"),
        ],
        ids=str,
    )
    def test_a_finished_run_names_the_argument_for_more(
        self, first: dict[str, int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train(Classifier(), tmp_path, checkpointer_args=SAVING, **first)
        train(Classifier(), tmp_path, resume="auto", checkpointer_args=SAVING, writers=["stdout"], **first)
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("scheduler", [False, True])
def test_a_resume_from_an_epochs_last_step_is_exact(scheduler: bool, tmp_path: Path) -> None:
    """The checkpoint is of the sixth of six steps, before validation and the epoch's end."""
    ended: list[int] = []

    class Dies(Classifier):
        def on_end_train_epoch(self, global_step: int) -> None:
            raise KeyboardInterrupt

    class Counts(Classifier):
        def on_end_train_epoch(self, global_step: int) -> None:
            ended.append(global_step)

    options: dict[str, Any] = {"dropout": 0.2, "validate": True, "scheduler": scheduler}
    saving = ts.DefaultCheckpointerArguments(every_n_steps=6, keep_last=None)
    torch.manual_seed(1)
    unbroken = train(Counts(**options), tmp_path / "a", epochs=2)
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        train(Dies(**options), tmp_path / "b", epochs=2, checkpointer_args=saving)
    again = train(Counts(**options), tmp_path / "b", epochs=2, checkpointer_args=saving, resume=True)

    assert ended == [6, 12, 6, 12]
    assert torch.equal(weights(again.module), weights(unbroken.module))
    assert again.history.get_metric_values("val/loss") == unbroken.history.get_metric_values("val/loss")


def test_a_newer_format_is_refused_with_a_correction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(manifest, "FORMAT_VERSION", 99)
        train(Classifier(), tmp_path, checkpointer_args=SAVING)

    for resume in (True, "auto", str(tmp_path / "checkpoints" / "checkpoint-000000006")):
        with pytest.raises(ts.CheckpointMismatchError, match=r"format version 99; .*up to 3\. Upgrade trainstack"):
            train(Classifier(), tmp_path, resume=resume, checkpointer_args=SAVING)


def test_another_precision_without_a_state_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(Classifier(), tmp_path, checkpointer_args=SAVING)
    train(Classifier(), tmp_path, epochs=2, backend="sp-bf16", resume=True, checkpointer_args=SAVING)

    assert re.search(r"arguments\.backend +'sp' +'sp-bf16' +another run", caplog.text)


def test_data_of_another_length_is_accepted_between_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tests.helpers.modules import numbers

    train(Classifier(numbers(41)), tmp_path, checkpointer_args=SAVING)
    longer = train(Classifier(numbers(80)), tmp_path, epochs=2, resume=True, checkpointer_args=SAVING)

    assert longer.global_steps_finished == 6 + 10
    assert re.search(r"data\.samples in an epoch +41 +80 +another run", caplog.text)
