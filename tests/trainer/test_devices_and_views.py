"""What users of other trainers look for: devices, defaults, views, and places to save to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train, weights
from tests.helpers.processes import run_world
from tests.helpers.workers import checkpoints
from trainstack.backends.world import pick_device


@contextmanager
def gpus(count: int) -> Iterator[None]:
    names = {"current_accelerator": torch.device("cuda"), "is_available": True, "device_count": count}
    with mock.patch.multiple(torch.accelerator, **{n: lambda v=v: v for n, v in names.items()}):
        yield


class TestDevices:
    @pytest.fixture
    def four_gpus(self) -> Any:
        with gpus(4):
            yield

    @pytest.mark.spec("FN-05")
    @pytest.mark.parametrize(
        ("wanted", "place", "device"),
        [
            ("cuda:1", (0, 1), "cuda:1"),
            (torch.device("cuda", 2), (0, 1), "cuda:2"),
            (3, (0, 1), "cuda:3"),
            (-1, (2, 4), "cuda:2"),
            ([3, 1], (0, 2), "cuda:3"),
            ([3, 1], (1, 2), "cuda:1"),
            (["cuda:0", "cpu"], (1, None), "cpu"),
            ([2], (0, 1), "cuda:2"),
            ("auto", (1, 2), "cuda:1"),
        ],
        ids=str,
    )
    @pytest.mark.usefixtures("four_gpus")
    def test_they_are_named_in_every_usual_way(self, wanted: Any, place: tuple[int, int | None], device: str) -> None:
        assert pick_device(wanted, *place) == torch.device(device)

    @pytest.mark.usefixtures("four_gpus")
    def test_there_are_as_many_as_processes(self) -> None:
        with pytest.raises(ts.ConfigurationError, match=r"device=\[0, 1\] names 2 devices, for 1 processes.*nproc=2"):
            pick_device([0, 1])
        with pytest.raises(ts.ConfigurationError, match=r"names 4 devices, for 1 processes"):
            pick_device(-1)
        with pytest.raises(ts.ConfigurationError, match=r"device=4: torch finds 4 accelerators"):
            pick_device(4)

    @pytest.mark.parametrize("wanted", ["cuda:7", torch.device("cuda", 7), 7, ["cuda:7"]], ids=str)
    @pytest.mark.usefixtures("four_gpus")
    def test_one_that_is_not_there_is_refused_however_it_is_named(self, wanted: Any) -> None:
        with pytest.raises(ts.ConfigurationError, match=r"device=('cuda:)?7'?: torch finds 4 accelerators"):
            pick_device(wanted)

    @pytest.mark.parametrize("wanted", ["auto", "cuda"])
    @pytest.mark.parametrize("rank", [0, 3])
    def test_more_processes_than_devices_are_refused_on_each_of_them(
        self, wanted: str, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with gpus(2), pytest.raises(ts.ConfigurationError, match=rf"device='{wanted}': 4 processes .* 2 accelerators"):
            pick_device(wanted, rank, 4)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        with gpus(1), pytest.raises(ts.ConfigurationError, match=r"4 processes .* 1 accelerators"):
            pick_device(wanted, rank, 4)
        with gpus(2), pytest.raises(ts.ConfigurationError, match=r"at least 3 processes .* 2 accelerators"):
            pick_device(wanted, 2, None)

    @pytest.mark.parametrize("wanted", ["auto", "cuda", -1, 0, "cuda:0"])
    @pytest.mark.parametrize("rank", [0, 3])
    def test_a_process_that_sees_its_own_device_alone_takes_it(
        self, wanted: Any, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        with gpus(1):
            assert pick_device(wanted, rank, 4) == torch.device("cuda:0")

    def test_a_number_without_an_accelerator_is_refused(self) -> None:
        if torch.accelerator.is_available():
            pytest.skip("there is one")
        for wanted in (0, -1):
            with pytest.raises(ts.ConfigurationError, match=rf"device={wanted}: torch finds 0 accelerators"):
                pick_device(wanted)

    @pytest.mark.parametrize("wrong", [[], True, [None], 1.5])
    def test_what_is_no_device_is_refused(self, wrong: Any) -> None:
        with pytest.raises(ts.ConfigurationError, match="device="):
            ts.TrainerArguments(device=wrong)

    def test_a_run_takes_the_one_of_its_process(self, tmp_path: Path) -> None:
        assert train(Classifier(), tmp_path, device=["cpu"]).device == torch.device("cpu")
        with pytest.raises(ts.ConfigurationError, match="names 2 devices"):
            train(Classifier(), tmp_path, device=["cpu", "cpu"])


class TestChoosingTheBackend:
    @pytest.mark.spec("FN-02")
    @pytest.mark.parametrize(("environ", "process"), [({}, "sp"), ({"RANK": "0", "WORLD_SIZE": "2"}, "ddp")])
    def test_auto_is_what_the_process_was_launched_for(
        self, environ: dict[str, str], process: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"} if environ else {}
        for name, value in (environ | place).items():
            monkeypatch.setenv(name, value)
        assert ts.TrainerArguments(backend="auto-bf16").backend == "auto-bf16"
        assert ts.build_trainer_backend("auto-bf16").spec == f"{process}-bf16"
        assert ts.build_trainer_backend("auto").spec == process

    def test_options_are_given_to_the_layers_that_it_stands_for(self, tmp_path: Path) -> None:
        trainer = train(Classifier(), tmp_path, backend="auto-amp", backend_options={"amp": {"init_scale": 2.0}})
        assert trainer.trainer_backend.spec == "sp-amp"
        with pytest.raises(ts.BackendSpecError, match="'bf16-auto'"):
            ts.TrainerArguments(backend="bf16-auto")


class TestTheViewOfARun:
    @pytest.mark.spec("FN-49", "HZ-32")
    def test_it_shows_counters_and_loaders(self, tmp_path: Path) -> None:
        module = Classifier(validate=True)
        given: list[Any] = []
        make = module.get_train_dataloader
        module.get_train_dataloader = lambda **options: given.append(make(**options)) or given[-1]  # type: ignore[func-returns-value]
        trainer = ts.Trainer(module, arguments(tmp_path, epochs=2, gpu_batch_size_limit=4))
        seen = []

        @trainer.on(ts.Event.TRAIN_STEP_END)
        def look(trainer: ts.Trainer) -> None:
            view = trainer.view
            counters = (view.epoch, view.global_step, view.steps_in_epoch, view.batches, view.batches_in_epoch)
            seen.append((*counters, view.samples_in_epoch))

        trainer.train()
        view = trainer.view
        assert seen[6:8] == [(1, 7, 1, 13, 2, 8), (1, 8, 2, 15, 4, 16)]
        assert (view.epochs, view.total_steps, view.steps_per_epoch, view.batches_per_step) == (2, 12, 6, 2)
        assert (view.epoch, view.global_step, view.batches, view.device) == (2, 12, 22, torch.device("cpu"))
        assert view.train_dataloader is given[-1]
        assert list(view.val_dataloaders) == ["default"]

    @pytest.mark.parametrize("name", ["epoch", "global_step", "batches", "train_dataloader", "new"])
    def test_it_cannot_be_written_to(self, name: str, tmp_path: Path) -> None:
        view = ts.Trainer(Classifier(validate=True), arguments(tmp_path)).view
        with pytest.raises(AttributeError):
            setattr(view, name, 1)
        with pytest.raises(TypeError):
            view.val_dataloaders["more"] = 1  # type: ignore[index]


class TestAStepOfEvaluationGivenToTheTrainer:
    @staticmethod
    def own(module: Any, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(module.net(batch[0]), batch[1]) + 100.0

    @pytest.mark.spec("FN-09")
    def test_it_takes_the_place_of_the_modules(self, tmp_path: Path) -> None:
        module = Classifier(validate=True)
        plain = ts.Trainer(module, arguments(tmp_path)).validate().metrics["val/loss"]
        trainer = ts.Trainer(module, arguments(tmp_path, backend="sp-bf16"), val_step=self.own)
        assert trainer.validate().metrics["val/loss"] == pytest.approx(plain + 100.0, abs=0.1)
        assert ts.Trainer(module, arguments(tmp_path)).validate().metrics["val/loss"] == plain

    def test_a_module_needs_none_of_its_own_then(self, tmp_path: Path) -> None:
        class Without(Classifier):
            val_step = ts.ModuleInterface.val_step  # type: ignore[assignment]

        trainer = ts.Trainer(Without(validate=True), arguments(tmp_path, overfit_batches=1), val_step=self.own)
        trainer.train()
        assert trainer.history.get_latest_metric("val/loss") > 100

    def test_one_that_cannot_be_called_so_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ts.ConfigurationError, match=r"def val_step\(module, global_step, batch, device\)"):
            ts.Trainer(Classifier(), arguments(tmp_path), val_step=lambda batch: 1)


class Bells(ts.ProgressDisplay):
    """Rings at each step."""

    next_look = 0

    def __init__(self) -> None:
        self.rung: list[Any] = []

    def start_epoch(self, epoch: int, epochs: int, total_steps: int | None, done: int) -> None:
        self.rung.append(f"epoch {epoch} of {epochs}")
        self.next_look = 0

    def look(self, done: int, loss: Callable[[], float | None]) -> None:
        self.rung.append(done)
        self.next_look = done + 1

    def end_epoch(self, summary: str = "") -> None:
        self.next_look = 1 << 62

    def start_validation(self, key: str, total: int | None) -> None:
        self.rung.append(key)
        self.next_look = 1 << 62

    def end_validation(self) -> None: ...

    def close(self) -> None:
        self.rung.append("closed")


@pytest.mark.spec("FN-26")
def test_a_progress_display_of_ones_own(tmp_path: Path) -> None:
    bells = Bells()
    train(Classifier(validate=True), tmp_path, progress=bells, max_train_steps_per_epoch=2)
    assert bells.rung == ["epoch 1 of 1", 1, 2, "default", "closed"]
    with pytest.raises(ts.ConfigurationError, match=r"progress='tqdm': write one of 'auto'.*ProgressDisplay"):
        ts.TrainerArguments(progress="tqdm")  # type: ignore[arg-type]


class TestLoadersThatGiveNothing:
    @staticmethod
    def line(train_set: Any, val_set: Any = None) -> ts.SupervisedModule:
        return ts.SupervisedModule(nn.Linear(6, 3), nn.functional.cross_entropy, "sgd", train_set, val_set)

    @pytest.mark.spec("FN-27")
    def test_without_samples_there_is_no_training(self, tmp_path: Path) -> None:
        empty = TensorDataset(torch.zeros(0, 6), torch.zeros(0).long())
        with pytest.raises(ts.ModuleContractError, match="a loader over an empty data set"):
            train(self.line(empty), tmp_path)

        class Lists(Classifier):
            def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
                return []

        with pytest.raises(ts.ModuleContractError, match="gave no batch at all"):
            train(Lists(), tmp_path)

    def test_a_validation_without_samples_is_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        empty = TensorDataset(torch.zeros(0, 6), torch.zeros(0).long())
        train(self.line(numbers(8), empty), tmp_path)
        assert "the val loader 'default' gave no batch at all" in caplog.text

    def test_what_cannot_be_iterated_is_refused(self, tmp_path: Path) -> None:
        class Wrong(Classifier):
            def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
                return 3

        with pytest.raises(ts.ModuleContractError, match="returned a int, which cannot be iterated over"):
            train(Wrong(), tmp_path)


class TestDefaultCallbacks:
    @pytest.mark.spec("PA-02")
    def test_they_are_added_or_there_are_none(self, tmp_path: Path) -> None:
        names = ["throughput/samples_per_s", "memory/host_peak", "train/loss_ema"]
        for wanted in (False, True):
            trainer = train(Classifier(), tmp_path, default_callbacks=wanted, log_every=2)
            assert [name in trainer.history.get_metric_names() for name in names] == [wanted] * 3

    def test_one_of_the_same_class_takes_the_place_of_the_default(self, tmp_path: Path) -> None:
        mine = ts.callbacks.MovingAverage("train/loss", decay=0.5)
        trainer = ts.Trainer(Classifier(), arguments(tmp_path, default_callbacks=True), callbacks=[mine])
        assert [c for c in trainer.events.callbacks.values() if isinstance(c, ts.callbacks.MovingAverage)] == [mine]
        assert len(trainer.events.callbacks) == len(ts.callbacks.default_callbacks())


class TestMovingAverage:
    @pytest.mark.spec("HZ-29")
    def test_it_weights_each_value_less_than_the_next(self, tmp_path: Path) -> None:
        callbacks = [ts.callbacks.MovingAverage("train/loss", "val/loss", decay=0.5)]
        trainer = ts.Trainer(Classifier(validate=True), arguments(tmp_path, log_every=1, epochs=2), callbacks=callbacks)
        trainer.train()
        for name in ("train/loss", "val/loss"):
            values = trainer.history.get_metric_values(name)
            sums = [sum(v * 0.5 ** (n - i) for i, v in enumerate(values[: n + 1])) for n in range(len(values))]
            expected = [s / sum(0.5**i for i in range(n + 1)) for n, s in enumerate(sums)]
            averages = trainer.history.records(f"{name}_ema")
            assert [a.value for a in averages] == pytest.approx(expected)
            assert [a.step for a in averages] == [r.step for r in trainer.history.records(name)]

    def test_a_resumed_run_goes_on_with_it(self, tmp_path: Path) -> None:
        saving = ts.DefaultCheckpointerArguments()
        histories = []
        for folder, parts in (("whole", [3]), ("parts", [1, 3])):
            for epochs in parts:
                args = arguments(tmp_path / folder, log_every=2, epochs=epochs, resume="auto", checkpointer_args=saving)
                trainer = ts.Trainer(Classifier(), args, callbacks=[ts.callbacks.MovingAverage()])
                trainer.train()
            histories.append(trainer.history.to_dict()["train/loss_ema"])
        assert histories[0] == histories[1]

    def test_wrong_values_are_refused(self) -> None:
        with pytest.raises(ts.ConfigurationError, match="decay=1"):
            ts.callbacks.MovingAverage(decay=1)
        with pytest.raises(ts.ConfigurationError, match="names of metrics"):
            ts.callbacks.MovingAverage(3)  # type: ignore[arg-type]


class TestSavingWhereOneChooses:
    @pytest.mark.spec("PA-22")
    def test_a_folder_of_ones_own_is_gone_on_from(self, tmp_path: Path) -> None:
        whole = train(Classifier(dropout=0.2, optimizer=torch.optim.AdamW), tmp_path, epochs=1)
        module = Classifier(dropout=0.2, optimizer=torch.optim.AdamW)
        torch.manual_seed(0)
        trainer = ts.Trainer(module, arguments(tmp_path / "a"))

        @trainer.on(ts.Event.TRAIN_STEP_END, once=3)
        def save(trainer: ts.Trainer) -> None:
            trainer.save_checkpoint(path=tmp_path / "mine" / "third")

        trainer.train()
        assert ts.read_checkpoint(tmp_path / "mine" / "third").global_step == 3
        assert not (tmp_path / "a" / "checkpoints").exists()
        torch.manual_seed(1)
        resumed = train(
            Classifier(dropout=0.2, optimizer=torch.optim.AdamW), tmp_path / "b", resume=tmp_path / "mine" / "third"
        )
        assert torch.equal(weights(resumed.module), weights(module))
        assert resumed.global_steps_finished == whole.global_steps_finished == 6
        trainer.save_checkpoint(path=tmp_path / "mine" / "last")
        assert ts.read_checkpoint(tmp_path / "mine" / "last").global_step == 6

    @pytest.mark.distributed
    def test_one_copy_for_the_world_or_for_each_node(self, tmp_path: Path) -> None:
        ranks = run_world(2, checkpoints.saves_on_nodes, directory=str(tmp_path))
        assert ranks == [{"world": True, "node": True, "same": True}, {"world": False, "node": True, "same": True}]
