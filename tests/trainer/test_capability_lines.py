"""Rows of docs/features.md, each used once in the way that the documentation of the other library describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train

SAVES = {"checkpointer_args": ts.DefaultCheckpointerArguments()}


@pytest.mark.spec("PMT-09", "PA-33", "HZ-27")
def test_a_trainer_is_set_up_in_the_documented_order(tmp_path: Path) -> None:
    train(Classifier(scheduler=True), tmp_path, **SAVES)
    calls: list[str] = []

    class Ordered(Classifier):
        def update_state(self, state: Any) -> None:
            calls.append("module restored")
            super().update_state(state)

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            calls.append("plan")
            return super().get_train_dataloader(sampler, batch_size)

        def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
            assert self.plan is not None
            assert estimated_global_steps_per_epoch >= self.plan.steps_per_epoch == 6  # type: ignore[operator]
            calls.append("optimizers made")
            return super().get_optimizers_schedulers(estimated_global_steps_per_epoch, epochs)

    class Tells(ts.SingleProcess):
        def place(self, module: Any, world: Any) -> None:
            calls.append("module placed")
            super().place(module, world)

        def prepare(self, work: Any) -> Any:
            calls.append("backend prepared")
            return super().prepare(work)

    class Keeps(ts.Trainer):
        def update_state(self, state: Any) -> None:
            calls.append("states restored")
            super().update_state(state)

    args = arguments(tmp_path, resume=True, epochs=2, **SAVES)
    assert Keeps(Ordered(scheduler=True), args, Tells()).plan.epochs == 2
    expected = ["module restored", "plan", "module placed", "optimizers made", "backend prepared", "states restored"]
    assert [name for name in dict.fromkeys(calls) if name in expected] == expected


@pytest.mark.spec("PMT-17", "PMB-10", "PA-27", "HZ-03", "HZ-15")
def test_the_trainer_has_the_requested_device_stack_and_module(tmp_path: Path) -> None:
    module = Classifier()
    for changes in ({"device": "cpu", "backend": "sp"}, {"device": "auto", "use_gpu": False, "backend": "sp-bf16"}):
        trainer = ts.Trainer(module, arguments(tmp_path, **changes))
        assert trainer.device == torch.device("cpu")
        assert trainer.trainer_backend.spec == changes["backend"]
        assert type(list(trainer.trainer_backend.layers())[-1]) is ts.SingleProcess
        trainer.train()
        assert trainer.module is module


@pytest.mark.spec("PA-03", "PA-05", "PA-13")
def test_a_custom_history_is_filled_and_can_be_reset(tmp_path: Path) -> None:
    class Mine(ts.RunHistory):
        pass

    history = Mine()
    trainer = ts.Trainer(Classifier(), arguments(tmp_path), run_history=history)
    trainer.train()
    assert trainer.history is history
    assert history.get_metric_names() == {"train/loss_epoch"}
    history.reset()
    assert not history.get_metric_names()
    assert not ts.Trainer(Classifier(), arguments(tmp_path)).history.get_metric_names()


@pytest.mark.spec("PA-16", "PA-28", "FN-04")
def test_data_optimizers_and_schedulers_are_made_in_methods(tmp_path: Path) -> None:
    class Mine(Classifier):
        def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
            first = torch.optim.SGD(self.net[0].parameters(), lr=0.5)  # type: ignore[operator,index]
            second = torch.optim.Adam(self.net[3].parameters(), lr=0.25)  # type: ignore[operator,index]
            return [first, second], [StepLR(first, step_size=2, gamma=0.1)]

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return self.build_dataloader(numbers(16), sampler, batch_size)

        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return {"dev": self.build_dataloader(numbers(4), sampler, batch_size)}

    trainer = train(Mine(), tmp_path, epochs=2)
    assert trainer.state.global_step == 4
    assert [type(one).__name__ for one in trainer.optimizers] == ["SGD", "Adam"]
    assert [one.param_groups[0]["lr"] for one in trainer.optimizers] == [pytest.approx(0.005), 0.25]
    assert "val/dev/loss" in trainer.history.get_metric_names()


@pytest.mark.spec("PA-24", "HZ-02", "HZ-04", "HZ-22", "HZ-33")
def test_a_run_keeps_its_checkpoints_in_one_folder(tmp_path: Path) -> None:
    changes = {**SAVES, "epochs": 3, "seed_everything": True}
    whole = train(Classifier(dropout=0.5, scheduler=True), tmp_path / "whole", **changes)
    stopped = ts.Trainer(Classifier(dropout=0.5, scheduler=True), arguments(tmp_path / "run", **changes))
    stopped.on(ts.Event.TRAIN_STEP_END, once=8)(lambda trainer: trainer.request_stop("later"))
    stopped.train()
    resumed = train(Classifier(dropout=0.5, scheduler=True), tmp_path / "run", resume=True, **changes)
    assert all(map(torch.equal, whole.module.state_dict().values(), resumed.module.state_dict().values()))
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-000000018").is_dir()
    assert resumed.output_dir == tmp_path / "run"

    elsewhere = ts.DefaultCheckpointerArguments(save_dir=str(tmp_path / "kept"))
    logs = ts.WriterArguments(tb_log_dir=str(tmp_path / "logs"))
    train(Classifier(), tmp_path / "other", checkpointer_args=elsewhere, writer_args=logs, writers=["csv"])
    assert (tmp_path / "kept" / "checkpoint-000000006").is_dir()
    assert list((tmp_path / "logs").glob("*.csv"))


@pytest.mark.spec("HZ-23")
def test_saving_is_switched_off(tmp_path: Path) -> None:
    train(Classifier(), tmp_path, checkpointer_args=ts.DefaultCheckpointerArguments(checkpoint=False))
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.spec("HZ-14", "FN-18")
def test_gradients_are_accumulated_to_the_same_update(tmp_path: Path) -> None:
    whole = train(Classifier(dtype=torch.float64), tmp_path / "whole")
    parts = train(Classifier(dtype=torch.float64), tmp_path / "parts", gpu_batch_size_limit=3)
    assert parts.gradient_accumulation == 3
    for one, other in zip(whole.module.parameters(), parts.module.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.spec("FN-19", "FN-23", "FN-28", "FN-53")
def test_options_reach_the_layer_and_evaluation_uses_autocast(tmp_path: Path) -> None:
    seen: dict[str, torch.dtype] = {}

    class Sees(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            seen["train"] = self.net(batch[0]).dtype
            return super().train_step(global_step, batch, device)

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            seen["val"] = self.net(batch[0]).dtype
            return super().val_step(global_step, batch, device)

    options = {"amp": {"init_scale": 1024.0}}
    trainer = train(Sees(validate=True), tmp_path, backend="sp-amp", backend_options=options)
    assert seen == {"train": torch.float16, "val": torch.float16}
    scaler = next(layer for layer in trainer.trainer_backend.layers() if layer.name == "amp").scaler  # type: ignore[attr-defined]
    assert scaler.get_scale() == 1024.0


@pytest.mark.spec("HZ-35")
def test_a_custom_trainer_saves_additional_state(tmp_path: Path) -> None:
    class Counting(ts.Trainer):
        count = 0

        def get_state(self) -> dict[str, Any]:
            return {**super().get_state(), "count": self.count + 1}

        def update_state(self, state: Any) -> None:
            self.count = state["count"]
            super().update_state(state)

    for expected in (0, 1):
        trainer = Counting(Classifier(), arguments(tmp_path, resume="auto", epochs=1 + expected, **SAVES))
        trainer.train()
        assert trainer.count == expected


@pytest.mark.spec("FN-44", "FN-47")
def test_an_export_is_loaded_but_cannot_be_resumed(tmp_path: Path) -> None:
    trainer = train(Classifier(), tmp_path / "run")
    trainer.export(tmp_path / "weights")
    fresh = Classifier(seed=7)
    fresh.load_state_dict(ts.read_model(tmp_path / "weights"))
    assert all(map(torch.equal, fresh.state_dict().values(), trainer.module.state_dict().values()))
    assert ts.warm_start(Classifier(seed=8), tmp_path / "weights").is_complete
    with pytest.raises(ts.CheckpointError, match="export"):
        train(Classifier(), tmp_path / "other", resume=str(tmp_path / "weights"))


@pytest.mark.spec("FN-48")
@pytest.mark.processes
def test_prefetched_batches_are_not_lost_on_resume(tmp_path: Path) -> None:
    class Sees(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.seen = [*getattr(self, "seen", []), *batch[0][:, 0].tolist()]
            return super().train_step(global_step, batch, device)

    whole = Sees()
    train(whole, tmp_path / "whole")
    first, second = (Sees(num_workers=1, prefetch_factor=4) for _ in range(2))
    stopped = ts.Trainer(first, arguments(tmp_path / "run", **SAVES))
    stopped.on(ts.Event.TRAIN_STEP_END, once=2)(lambda trainer: trainer.request_stop("later"))
    stopped.train()
    stopped.close()
    train(second, tmp_path / "run", resume=True, **SAVES).close()
    assert first.seen + second.seen == whole.seen


@pytest.mark.spec("PMB-23")
def test_training_data_is_shuffled_and_validation_data_is_not(tmp_path: Path) -> None:
    trainer = ts.Trainer(Classifier(validate=True), arguments(tmp_path))
    assert trainer.train_sampler is torch.utils.data.RandomSampler
    assert trainer.val_sampler is torch.utils.data.SequentialSampler
    seen: list[Any] = []
    trainer.on(ts.Event.TRAIN_BATCH_BEGIN)(lambda trainer, batch: seen.extend(trainer.view.indices))
    trainer.train()
    assert sorted(seen) == list(range(41)) != seen


@pytest.mark.spec("PMB-03")
def test_a_backend_is_configured_without_a_trainer() -> None:
    module = Classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = module.net[0].weight.detach().clone()  # type: ignore[union-attr,operator]
    backend = ts.build_trainer_backend("sp")
    backend.init(ts.TrainerBackendArguments(model=module, optimizers=[optimizer], device="cpu"))
    backend.train_dl(module.get_train_dataloader(torch.utils.data.RandomSampler, 8), None)
    assert not torch.equal(before, module.net[0].weight)  # type: ignore[union-attr,arg-type]
