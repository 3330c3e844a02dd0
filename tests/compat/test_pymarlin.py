"""`trainstack.compat.pymarlin`: code from the documentation of PyMarlin runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

import trainstack as ts
from tests.helpers.processes import run_world
from tests.helpers.workers import compat
from tools import pymarlin_scripts
from trainstack.compat.pymarlin.core import data_interface, module_interface, trainer, trainer_backend
from trainstack.compat.pymarlin.utils import differential_privacy, distributed, fabrics
from trainstack.compat.pymarlin.utils.checkpointer.checkpoint_utils import (
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
)
from trainstack.compat.pymarlin.utils.config_parser.custom_arg_parser import CustomArgParser
from trainstack.compat.pymarlin.utils.stats import BasicStats, global_stats
from trainstack.compat.pymarlin.utils.stats.basic_stats import StatInitArguments
from trainstack.compat.pymarlin.utils.writer.base import Writer, WriterInitArguments


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Arguments with PyMarlin's defaults write into the current folder."""
    monkeypatch.chdir(tmp_path)
    yield
    logging.getLogger("CustomArgParser").handlers.clear()


class Line(module_interface.ModuleInterface):
    """A linear model for 24 points that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        nn.init.constant_(self.net.weight, 0.5)
        nn.init.zeros_(self.net.bias)
        x = torch.arange(24.0)[:, None] / 24
        self.data = TensorDataset(x, 2 * x)
        self.calls: list[Any] = []

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        self.calls.append("optimizers")
        return [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)], []

    def get_train_dataloader(self, sampler: type, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size=batch_size, sampler=sampler(self.data))

    def get_val_dataloaders(self, sampler: type, batch_size: int) -> Any:
        loader = DataLoader(self.data, batch_size=batch_size, sampler=sampler(self.data))
        return {"one": loader, "two": loader}

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1]), batch[0]

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.net(batch[0]), batch[1]


def arguments(**changes: Any) -> trainer.TrainerArguments:
    saving = DefaultCheckpointerArguments(checkpoint=False)
    values = {"train_batch_size": 8, "val_batch_size": 8, "writers": [], "checkpointer_args": saving, **changes}
    return trainer.TrainerArguments(**{"disable_tqdm": True, "use_gpu": False, **values})


# --- scripts


@pytest.mark.spec("PMT-01", "PMT-02", "PMT-04", "PMT-10", "PMB-13")
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("name", pymarlin_scripts.NAMES)
def test_a_script_trains_after_changes_of_imports_only(name: str, tmp_path: Path) -> None:
    script = pymarlin_scripts.change(name)

    assert script.imports > 0
    assert script.others == (1 if name == "snli" else 0)
    pymarlin_scripts.run(script, tmp_path)


@pytest.mark.spec("PMB-13")
def test_a_delta_of_one_over_the_records_is_refused(tmp_path: Path) -> None:
    script = pymarlin_scripts.change("snli", edits=False)
    assert script.others == 0
    with pytest.raises(ts.PrivacyError, match=r"publishes each record with probability delta would pass. Write less"):
        pymarlin_scripts.run(script, tmp_path)


# --- hooks


class Hooked(Line):
    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.calls.append(("begin", global_step, epoch))

    def on_end_backward(self, global_step: int, loss_tensor: Any) -> None:
        self.calls.append(("backward", global_step, loss_tensor.item()))

    def on_end_train_step(self, global_step: int, losses: Any, inputs: Any) -> None:
        self.calls.append(("step", global_step, losses.mean().item()))

    def on_end_train_epoch(self, global_step: int, losses: Any, inputs: Any) -> None:
        self.calls.append(("epoch", global_step, len(inputs)))

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
        self.calls.append(("val", global_step, key))

    def on_end_train(self, global_step: int) -> None:
        self.calls.append(("end", global_step))


@pytest.mark.spec("PMT-10", "PMT-25", "PMB-11")
def test_hooks_have_the_order_and_arguments_of_pymarlin() -> None:
    module = Hooked()
    trainer.Trainer(module, arguments(epochs=2, gpu_batch_size_limit=4)).train()

    names = [call if isinstance(call, str) else call[0] for call in module.calls]
    step = ["backward", "backward", "step"]
    assert names == ["optimizers", *2 * ["begin", *3 * step, "val", "val", "epoch"], "end"]
    backward = [call[1:] for call in module.calls if call[0] == "backward"]
    losses = [call[2] for call in module.calls if call[0] == "step"]
    assert [finished for finished, _ in backward] == [step for step in range(6) for _ in range(2)]
    # the loss over the micro-batches of the step: two of them sum to its mean
    assert [a[1] + b[1] for a, b in zip(backward[::2], backward[1::2], strict=True)] == pytest.approx(losses)
    assert [call for call in module.calls if call[0] == "epoch"] == [("epoch", 3, 24), ("epoch", 6, 24)]


@pytest.mark.spec("PMT-25")
def test_an_interrupted_validation_calls_the_epoch_hook_once() -> None:
    class Interrupted(Hooked):
        interrupts = True

        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            super().on_end_val_epoch(global_step, *outputs, key=key)
            if self.interrupts:
                self.interrupts = False
                raise KeyboardInterrupt

    module = Interrupted()
    made = trainer.Trainer(module, arguments())
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert ("epoch", 3, 24) not in module.calls
    made.train()
    assert module.calls.count(("epoch", 3, 24)) == 1


@pytest.mark.spec("PMT-11")
def test_validate_returns_the_outputs_of_the_last_loader() -> None:
    class Measured(Line):
        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            global_stats.update(f"{key}/error", (outputs[0] - outputs[1]).abs().mean().item())

    made = trainer.Trainer(Measured(), arguments())
    predicted, wanted = made.validate()

    assert predicted.shape == wanted.shape == (24, 1)
    assert {"one/error", "two/error"} <= made.history.get_metric_names()


# --- arguments


@pytest.mark.spec("PMT-04", "PMT-07")
def test_arguments_by_position_have_the_defaults_of_pymarlin() -> None:
    args = trainer.TrainerArguments(3, False, 16)

    assert (args.epochs, args.use_gpu, args.train_batch_size) == (3, False, 16)
    assert (args.gpu_batch_size_limit, args.val_batch_size, args.max_grad_norm) == (512, 1, 1.0)
    assert (args.backend, args.amp_level_apex, args.reset_optimizers_schedulers) == ("sp", "O1", False)
    assert args.log_interval == args.stats_args.log_steps == 1
    assert [getattr(one, "directory", one) for one in args.writers] == ["stdout", Path("logs").absolute()]
    saving = args.checkpointer_args
    assert (saving.save_dir, saving.file_prefix, saving.file_ext) == (
        str(Path("checkpoints").absolute()),
        "model",
        "pt",
    )
    assert trainer.DefaultCheckpointerArguments(True, False, 5).period == 5
    with pytest.raises(ts.ConfigurationError, match=r"no argument 'num_epochs'. Write epochs"):
        trainer.TrainerArguments(num_epochs=3)


@pytest.mark.spec("PMT-04")
def test_arguments_are_mutable_until_a_trainer_uses_them() -> None:
    args = arguments()
    args.epochs = 4
    with pytest.raises(ts.ConfigurationError, match="epochs=-1"):
        args.epochs = -1
    with pytest.raises(ts.ConfigurationError, match=r"no argument 'epoch'. Write epochs"):
        args.epoch = 3
    assert args.epochs == 4
    made = trainer.Trainer(Line(), args)
    with pytest.raises(ts.ConfigurationError, match=r"epochs was assigned after a Trainer .* trainer.train\(epochs="):
        args.epochs = 5
    made.train()
    made.train(epochs=5)
    assert made.last_epoch == 4


@pytest.mark.spec("PMT-04")
def test_the_azure_writer_is_omitted_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = arguments(writers=["aml"], stats_args=StatInitArguments(update_system_stats=True))
    assert args.writers == ()
    assert "the writer 'aml' is left out. On Azure ML write 'mlflow'" in caplog.text
    made = trainer.Trainer(Line(), args)
    made.train()
    if sys.platform != "win32":
        assert "memory/host_peak" in made.history.get_metric_names()


def test_writers_with_the_methods_of_pymarlin_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Mine(Writer):
        def log_scalar(self, k: str, v: float, step: int) -> None:
            seen.append((k, step))

        def finish(self) -> None:
            seen.append("finished")

    monkeypatch.setenv("LOGS_OF_THE_JOB", str(tmp_path / "above"))
    folder = WriterInitArguments("tb", "LOGS_OF_THE_JOB")
    for _ in range(2):
        writers = [Mine(), "tensorboard"]
        trainer.Trainer(Line(), arguments(writers=writers, writer_args=folder, report=False)).train()

    assert ("train/loss", 3) in seen
    assert seen[-1] == "finished"
    files = sorted(path.parent for path in (tmp_path / "above").rglob("*tfevents*"))
    assert files == [tmp_path / "above" / "tb", tmp_path / "above" / "tb" / "run-1"]


@pytest.mark.spec("PMB-13")
def test_private_arguments_may_be_given_by_position() -> None:
    args = differential_privacy.DifferentialPrivacyArguments(0.8, 2.0, 0.0, 1e-6)
    assert (args.noise_multiplier, args.per_sample_max_grad_norm, args.sample_rate, args.delta) == (
        0.8,
        2.0,
        None,
        1e-6,
    )
    target = differential_privacy.DifferentialPrivacyArguments(target_epsilon=3.0, delta=1e-6)
    assert (target.noise_multiplier, target.target_epsilon) == (None, 3.0)
    with pytest.raises(ts.ConfigurationError, match=r"delta is missing: .* 1 / "):
        differential_privacy.DifferentialPrivacyArguments()
    with pytest.raises(ts.ConfigurationError, match="NoDPWrap leaves an optimizer without noise"):
        differential_privacy.NoDPWrap(None)


@pytest.mark.spec("PMT-23")
def test_distributed_arguments_have_the_place_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = distributed.DistributedTrainingArguments()
    assert (alone.local_rank, alone.global_rank, alone.world_size) == (0, 0, 1)
    assert distributed.DistributedTrainingArguments(1, 3, 4, "gloo", "env://", 64).gather_frequency == 64
    with pytest.raises(ts.ConfigurationError, match=r"init_method='tcp://x:1': .* master_addr and master_port"):
        distributed.DistributedTrainingArguments(init_method="tcp://x:1")
    assert trainer.Trainer(Line(), arguments()).args.distributed_training_args.local_rank == 0

    assert not fabrics.is_azureml_mpirun()
    names = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    for name, value in names.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("AZ_BATCHAI_MPI_MASTER_NODE", "10.0.0.4")
    assert fabrics.is_azureml_mpirun()
    found = distributed.place_of_this_process()
    assert (found.local_rank, found.global_rank, found.world_size) == (1, 1, 2)


# --- backends

STRINGS = {
    "sp": "SingleProcess",
    "sp-amp": "SingleProcessAmp",
    "sp-dp": "SingleProcessDpSgd",
    "ddp": "DDPTrainerBackend",
    "ddp-amp": "DDPTrainerBackend",
    "ddp-dp": "DDPTrainerBackend",
    "sp-amp-apex": "SingleProcessApexAmp",
    "ddp-amp-apex": "DDPTrainerBackend",
}


@pytest.mark.spec("PMB-01", "PMB-02", "PMB-22")
@pytest.mark.parametrize("string", STRINGS)
def test_the_eight_backend_strings_of_pymarlin_build_stacks(string: str) -> None:
    stack = trainer_backend.build_trainer_backend(string)

    assert stack.spec == string
    assert type(stack).__name__ == STRINGS[string]
    if string.startswith("ddp"):
        assert stack.trainer_backend is stack.inner
        assert trainer_backend.build_trainer_backend(string, gather_frequency=4).spec == string


@pytest.mark.spec("PMB-02")
def test_flat_options_are_accepted_and_wrong_ones_refused() -> None:
    build = trainer_backend.build_trainer_backend
    assert build("ddp-amp", gather_frequency=4, enable_amp=True, init_scale=1024.0).spec == "ddp-amp"
    assert build("sp-bf16").spec == "sp-bf16"
    with pytest.raises(ts.ConfigurationError, match="'sp' for 'sp-amp'"):
        build("sp-amp", enable_amp=False)
    with pytest.raises(ts.ConfigurationError, match=r"does not take \{'gather_frequency': 4\}"):
        build("sp", gather_frequency=4)
    # the error of trainstack's function suggests the argument to write
    with pytest.raises(ts.ConfigurationError, match=r"Write ddp=\{'gather_frequency': 4\}"):
        ts.build_trainer_backend("ddp-amp", gather_frequency=4)
    with pytest.raises(ts.ConfigurationError, match="'sp-amp' with it, 'sp' without"):
        ts.build_trainer_backend("ddp-amp", enable_amp=True)


@pytest.mark.spec("PMT-03", "PMB-04", "PMB-11")
@pytest.mark.parametrize(
    ("method", "verbs"),
    {
        "train_dl": "forward, backward, clip or step",
        "validate_dl": "forward, begin_evaluation or gather",
        "process_global_step": "clip or step",
        "optimize": "step",
        "_forward_backward": "forward and backward",
        "cleanup": "close",
    }.items(),
)
def test_a_backend_with_methods_of_pymarlin_is_refused(method: str, verbs: str) -> None:
    theirs = type("Theirs", (ts.SingleProcess,), {method: lambda self, *args: None})
    for stack in (theirs(), ts.build_trainer_backend("sp-amp").__class__(theirs())):
        with pytest.raises(ts.ConfigurationError, match=f"Theirs defines {method}, .* for {method} override {verbs}"):
            ts.Trainer(Line(), ts.TrainerArguments(writers=[]), stack)


@pytest.mark.spec("PMB-12", "PMB-23")
def test_samplers_and_states_of_an_inner_layer_are_refused() -> None:
    sampled = type("Sampled", (ts.SingleProcess,), {"train_sampler": RandomSampler})
    stateful = type("Stateful", (ts.SingleProcess,), {"get_state": lambda self: {}})
    amp = type(ts.build_trainer_backend("sp-amp"))
    with pytest.raises(ts.ConfigurationError, match="for train_sampler return a loader with the sampler from"):
        ts.Trainer(Line(), ts.TrainerArguments(writers=[]), sampled())
    with pytest.raises(ts.ConfigurationError, match="for get_state override get_layer_state"):
        ts.Trainer(Line(), ts.TrainerArguments(writers=[]), amp(stateful()))
    assert ts.Trainer(Line(), ts.TrainerArguments(writers=[]), stateful()).trainer_backend.get_state() == {}


@pytest.mark.spec("PMT-03", "PMB-16")
def test_a_decorator_with_the_constructor_of_pymarlin_works() -> None:
    class Doubled(trainer_backend.AbstractTrainerBackendDecorator):
        def backward(self, work: Any, loss: Any, weight: float) -> None:
            self.trainer_backend.backward(work, loss, 2 * weight)

    plain, doubled = Line(), Line()
    trainer.Trainer(plain, arguments(clip_grads=False, max_train_steps_per_epoch=1)).train()
    stack = Doubled(trainer_backend.SingleProcess())
    trainer.Trainer(doubled, arguments(clip_grads=False, max_train_steps_per_epoch=1), stack).train()

    moved = [module.net.weight.item() - 0.5 for module in (plain, doubled)]
    assert moved[1] == pytest.approx(2 * moved[0])


@pytest.mark.spec("PMT-01")
def test_a_trainer_with_inner_methods_of_pymarlin_is_refused() -> None:
    class Mine(trainer.Trainer):
        def train_epoch(self) -> None: ...

    with pytest.raises(ts.ConfigurationError, match=r"Mine defines train_epoch, .* write hooks of the module"):
        Mine(Line(), arguments())


def test_an_override_of_validate_is_refused() -> None:
    class Mine(trainer.Trainer):
        def validate(self, *given: Any, **options: Any) -> Any: ...

    with pytest.raises(ts.ConfigurationError, match=r"Mine defines validate, .* write val_step, on_validation_begin"):
        Mine(Line(), arguments())


@pytest.mark.spec("PMB-03", "PMB-04", "PMB-10", "PMB-12")
def test_a_backend_without_a_trainer_equals_a_plain_loop() -> None:
    module, plain = Line(), Line()
    backend = trainer_backend.build_trainer_backend("sp")
    optimizers, _ = module.get_optimizers_schedulers(3, 1)
    place = distributed.DistributedTrainingArguments()
    backend.init(
        trainer_backend.TrainerBackendArguments(module, "cpu", 8, None, None, place, optimizers, clip_grads=False)
    )
    backend.train_dl(DataLoader(module.data, batch_size=8), module_interface.CallbackInterface())

    optimizer = plain.get_optimizers_schedulers(3, 1)[0][0]
    for x, y in DataLoader(plain.data, batch_size=8):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain.net(x), y).backward()
        optimizer.step()
    assert torch.equal(module.net.weight, plain.net.weight)
    assert (backend.get_global_steps_completed(), backend.get_batches_completed()) == (3, 3)
    with pytest.raises(ts.ConfigurationError, match="without a Trainer: the privacy layer draws the records"):
        trainer_backend.TrainerBackendArguments(module, differential_privacy_args=object())
    with pytest.raises(ts.ConfigurationError, match=r"SingleProcessApexAmp\(opt_level='O2'\)"):
        trainer_backend.TrainerBackendArguments(module, amp_level_apex="O2")


@pytest.mark.spec("PMB-04", "PMB-12", "PMT-24")
def test_the_backend_of_a_trainer_has_its_counters() -> None:
    made = trainer.Trainer(Line(), arguments(gpu_batch_size_limit=4))
    made.train()
    backend = made.trainer_backend

    assert (backend.get_global_steps_completed(), backend.get_batches_completed()) == (3, 6)
    with pytest.raises(ts.CheckpointMismatchError, match=r"trainer.state.global_step"):
        backend.update_state({"global_step_completed": 3, "batches_completed": 6})


@pytest.mark.distributed
@pytest.mark.spec("PMB-17", "PMB-18", "PMB-19", "PMB-20")
@pytest.mark.parametrize("as_objects", [False, True])
def test_ddp_trains_a_module_with_an_unused_parameter(as_objects: bool, tmp_path: Path) -> None:
    """Each rank begins with other weights, and has those of rank 0 afterwards."""
    ranks = run_world(2, compat.train_ddp, directory=str(tmp_path), as_objects=as_objects)

    for rank, found in enumerate(ranks):
        assert found == {
            "steps": 6,
            "unused": [[0.0, 0.0], [0.0, 0.0]],
            "inner": "SingleProcess",
            "place": [rank, rank, 2],
        }


@pytest.mark.spec("PMB-23", "PMT-24")
def test_the_samplers_shuffle_only_the_training_data() -> None:
    made = trainer.Trainer(Line(), arguments())
    assert (made.train_sampler, made.val_sampler) == (RandomSampler, SequentialSampler)

    class Seen(Hooked):
        def on_end_train_epoch(self, global_step: int, losses: Any, inputs: Any) -> None:
            self.calls.append(inputs.flatten().tolist())

        def on_end_val_epoch(self, global_step: int, predicted: Any, wanted: Any, key: str = "default") -> None:
            assert torch.equal(wanted, self.data.tensors[1])

    module = Seen()
    trainer.Trainer(module, arguments(epochs=2)).train()
    first, second = (call for call in module.calls if isinstance(call, list))
    ordered = module.data.tensors[0].flatten().tolist()
    assert sorted(first) == sorted(second) == ordered
    assert first != second != ordered


# --- checkpoints


class Theirs(ts.AbstractCheckpointer):
    """PyMarlin's three signatures, in memory."""

    def __init__(self) -> None:
        self.kept = ts.Checkpoint()
        self.model: Any = None

    def save(self, checkpoint_state: Any, index: int, force: bool = False) -> None:  # type: ignore[override]
        copies = {name: value.clone() for name, value in checkpoint_state.module_interface_state.items()}
        self.kept = ts.Checkpoint(**{**vars(checkpoint_state), "module_interface_state": copies})

    def save_model(self, model_state: Any, index: int) -> None:  # type: ignore[override]
        self.model = (sorted(model_state), index)

    def load(self) -> Any:  # type: ignore[override]
        return self.kept


@pytest.mark.spec("PMT-08", "PMT-12", "PMT-13", "PMT-14")
@pytest.mark.parametrize("package", [ts, trainer], ids=["trainstack", "compat"])
def test_a_checkpointer_with_the_signatures_of_pymarlin_works(package: Any, tmp_path: Path) -> None:
    checkpointer = Theirs()
    args: dict[str, Any] = {"train_batch_size": 8, "writers": [], "progress": "none", "device": "cpu"}
    package.Trainer(Line(), package.TrainerArguments(**args), checkpointer=checkpointer).train()
    assert checkpointer.model == (["net.bias", "net.weight"], 0)

    module = Line()
    made = package.Trainer(module, package.TrainerArguments(epochs=2, **args), checkpointer=checkpointer)
    assert made.plan is not None
    assert made.last_epoch == 0
    assert torch.equal(module.net.weight, checkpointer.kept.module_interface_state["net.weight"])
    made.train()
    assert made.last_epoch == 1


@pytest.mark.spec("PMT-08")
def test_a_checkpointer_with_a_wrong_signature_is_refused() -> None:
    class Misspelt(Theirs):
        def save(self, checkpoint_state: Any) -> None:  # type: ignore[override]
            raise AssertionError

    args = arguments()
    with pytest.raises(
        ts.ConfigurationError, match=r"Misspelt.save cannot .* Write def save\(self, checkpoint_state, "
    ):
        trainer.Trainer(Line(), args, checkpointer=Misspelt())
    with pytest.raises(ts.ConfigurationError, match=r"Theirs.load .* with resume='auto' .* or remove resume"):
        ts.Trainer(Line(), ts.TrainerArguments(resume="auto", writers=[]), checkpointer=Theirs())


@pytest.mark.spec("PMT-09", "PMT-14", "PMT-16")
def test_a_trainer_is_set_up_in_the_order_of_pymarlin(tmp_path: Path) -> None:
    class Ordered(Line):
        def update_state(self, state: Any) -> None:
            super().update_state(state)
            self.calls.append("module")

        def to(self, *args: Any, **options: Any) -> Any:
            self.calls.append("device")
            return super().to(*args, **options)

    saving = {"save_dir": str(tmp_path / "saved"), "model_state_save_dir": str(tmp_path / "models")}
    first = trainer.Trainer(Line(), arguments(checkpointer_args=DefaultCheckpointerArguments(**saving)))
    first.train()
    module = Ordered()
    loading = DefaultCheckpointerArguments(**saving, load_dir=str(tmp_path / "saved"))
    second = trainer.Trainer(module, arguments(epochs=2, checkpointer_args=loading))

    assert second.plan is not None
    assert module.calls[:3] == ["module", "device", "optimizers"]
    buffers = [
        trainer.optimizers[0].state[p]["momentum_buffer"]
        for trainer in (first, second)
        for p in trainer.module.parameters()
    ]
    assert all(torch.equal(*pair) for pair in zip(buffers[:2], buffers[2:], strict=True))
    assert second.last_epoch == 0

    with pytest.warns(DeprecationWarning, match="checkpointer.last()"):
        newest = DefaultCheckpointer.get_latest_file(str(tmp_path / "saved"), "model")
    assert newest == str(first.checkpointer.last().path)
    with pytest.warns(DeprecationWarning, match="checkpointer.last"):
        assert DefaultCheckpointer.get_latest_file(str(tmp_path / "nowhere"), "model") == ""


@pytest.mark.spec("PMT-14")
def test_a_folder_without_checkpoints_starts_a_new_run(caplog: pytest.LogCaptureFixture) -> None:
    saving = DefaultCheckpointerArguments(load_dir="checkpoints")
    for last_epoch in (-1, 0):
        made = trainer.Trainer(Line(), arguments(checkpointer_args=saving, epochs=last_epoch + 2))
        assert made.plan is not None
        assert made.last_epoch == last_epoch
        assert ("A new run starts." in caplog.text) == (last_epoch == -1)
        caplog.clear()
        made.train()
        made.close()
    with pytest.raises(ts.CheckpointNotFoundError):
        trainer.Trainer(Line(), arguments(checkpointer_args=saving, resume="elsewhere")).train()


@pytest.mark.spec("PMT-17")
def test_the_device_is_the_cpu_without_gpus() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for use_gpu in (True, False):
        assert trainer.Trainer(Line(), arguments(use_gpu=use_gpu)).device == torch.device("cpu")


@pytest.mark.spec("PMT-06")
def test_a_custom_trainer_defines_train_and_validate() -> None:
    class Mine(trainer.AbstractTrainer):
        def train(self) -> None: ...

        def validate(self, *args: Any, **options: Any) -> dict[str, Any]:
            return {}

    assert Mine().validate() == {}
    with pytest.raises(NotImplementedError, match="Mine does not define test"):
        Mine().test()


# --- statistics, data, configuration


def test_statistics_that_are_not_recorded_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stats = BasicStats()
    for _ in range(2):
        stats.update("loss", 1.0, frequent=True)
        stats.update_image("picture", torch.zeros(2, 2))
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "global_stats.update('loss', ...)",
        "global_stats.update_image",
    ]


class Doubler(data_interface.DataProcessor):
    def process(self, numbers: int, factor: int = 1) -> Any:
        return [numbers * factor]

    def analyze(self) -> None:
        self.analyzed = True


@pytest.mark.processes
def test_a_processor_runs_in_several_processes() -> None:
    processor = Doubler()
    assert processor.process_data(3, 2) == [6]
    assert processor.analyzed
    assert processor.multi_process_data([1, 2, 3], 2, process_count=2) == [2, 4, 6]
    place = distributed.DistributedPreprocessArguments(global_rank=1, node_count=2, local_size=1)
    assert Doubler(place).multi_process_data([1, 2, 3, 4]) == [3, 4]
    with pytest.raises(ValueError, match="Give at least one list"):
        processor.multi_process_data(1)


CONFIG = """
tr:
  epochs: 2
  clip_grads: true
  sizes: [1, 2]
  rate: 0.5
  load_dir: null
task: cola
"""


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    Path("config.yaml").write_text(CONFIG)
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    return CustomArgParser(log_level="WARNING").parse()


def test_the_command_line_overrides_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parsed(monkeypatch)["tr"] == {
        "epochs": 2,
        "clip_grads": True,
        "sizes": [1, 2],
        "rate": 0.5,
        "load_dir": None,
    }
    words = [
        "--tr.epochs",
        "4",
        "--tr.clip_grads",
        "no",
        "--tr.sizes",
        "3-4",
        "--tr.rate=1e-3",
        "--tr.load_dir",
        "here",
    ]
    config = parsed(monkeypatch, *words, "--task", "rte", "--tr.epoch", "9")
    assert config["tr"] == {"epochs": 4, "clip_grads": False, "sizes": [3, 4], "rate": 1e-3, "load_dir": "here"}
    assert (config["task"], config["config_path"]) == ("rte", "config.yaml")
    assert (
        "--tr.epoch is not in the configuration file, and is left out. Did you mean --tr.epochs?"
        in capsys.readouterr().err
    )

    params = '{"--tr.epochs": 7, "task": "qqp", "--tr.rate": "0.25"}'
    config = parsed(monkeypatch, "--tr.epochs", "4", "--params", params)
    assert (config["tr"]["epochs"], config["tr"]["rate"], config["task"]) == (7, 0.25, "qqp")
    with pytest.raises(ts.ConfigurationError, match=r"--tr.epochs 'many': the file has 2. Write a int"):
        parsed(monkeypatch, "--tr.epochs", "many")
    with pytest.raises(ts.ConfigurationError, match=r"is not (a )?JSON"):
        parsed(monkeypatch, "--params", "{")


def test_a_folder_as_path_selects_its_only_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(monkeypatch, "--config_path", ".")["task"] == "cola"
    Path("other.yaml").write_text("a: 1")
    with pytest.raises(ts.ConfigurationError, match=r"has 2 YAML files"):
        parsed(monkeypatch, "--config_path", os.curdir)
