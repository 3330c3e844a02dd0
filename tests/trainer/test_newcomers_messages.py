"""Errors of the first hour suggest the code to write, also for names of other libraries."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from trainstack.trainer.argument_names import ALIASES, OTHER_HOOKS

# --- arguments of other libraries

LIGHTNING = """accelerator strategy devices num_nodes precision logger callbacks max_epochs limit_train_batches
limit_val_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing
enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val gradient_clip_algorithm profiler
detect_anomaly sync_batchnorm default_root_dir ckpt_path datamodule train_dataloaders val_dataloaders"""
TRANSFORMERS = """do_eval eval_strategy evaluation_strategy per_device_eval_batch_size gradient_accumulation_steps
learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon num_train_epochs lr_scheduler_type lr_scheduler_kwargs
warmup_ratio warmup_steps logging_dir logging_steps save_strategy save_steps save_total_limit use_cpu no_cuda data_seed
bf16 fp16 tf32 local_rank ddp_backend dataloader_drop_last eval_steps dataloader_num_workers dataloader_prefetch_factor
remove_unused_columns label_names load_best_model_at_end metric_for_best_model greater_is_better fsdp fsdp_config
deepspeed label_smoothing_factor optim optim_args group_by_length report_to ddp_find_unused_parameters
dataloader_pin_memory dataloader_persistent_workers push_to_hub resume_from_checkpoint hub_model_id hub_token
gradient_checkpointing gradient_checkpointing_kwargs full_determinism auto_find_batch_size torch_compile eval_on_start
overwrite_output_dir model data_collator train_dataset eval_dataset compute_metrics optimizers"""
KERAS = """x y batch_size verbose callbacks validation_split validation_data shuffle class_weight sample_weight
initial_epoch steps_per_epoch validation_steps validation_batch_size validation_freq optimizer loss metrics loss_weights
jit_compile"""
SKORCH = """module criterion optimizer lr max_epochs batch_size iterator_train iterator_valid dataset train_split
callbacks warm_start verbose"""
IGNITE = "model optimizer loss_fn amp_mode gradient_accumulation_steps data max_epochs epoch_length max_iters"
MORE = """save_every keep_last keep_best save_top_k patience early_stopping num_workers logdir log_dir save_dir
monitor_metric checkpoint num_epochs"""


def names_of_others() -> list[str]:
    return sorted({name for text in (LIGHTNING, TRANSFORMERS, KERAS, SKORCH, IGNITE, MORE) for name in text.split()})


@pytest.mark.parametrize("name", names_of_others())
def test_an_error_for_a_foreign_argument_suggests_ours(name: str) -> None:
    with pytest.raises(ts.ConfigurationError) as raised:
        ts.TrainerArguments(**{name: 1})
    assert str(raised.value) == f"TrainerArguments has no argument {name!r}. Write {ALIASES[name]}."


def written_arguments(text: str) -> Iterator[tuple[Any, str]]:
    """The classes with keyword arguments that a suggestion names."""
    for name, given in re.findall(r"(\w+)\(([^()]*)\)", text):
        if isinstance(kind := getattr(ts, name, None), type):
            yield from ((kind, part.split("=")[0].strip()) for part in given.split(",") if "=" in part)


def test_suggested_arguments_exist() -> None:
    fields = {field.name for field in dataclasses.fields(ts.TrainerArguments)}
    for name, text in ALIASES.items():
        assert name not in fields, f"{name} is an argument"
        first = text.replace("=", " ").replace(",", " ").replace(":", " ").replace("(", " ").split()[0]
        known = first in fields or hasattr(ts, first.partition(".")[0])
        known = known or first in ("it", "its", "nothing", "trainer.export", "trainer.validate", "the", "sampler")
        assert known, f"{name}: {text}"
        for kind, argument in written_arguments(text):
            assert argument in inspect.signature(kind).parameters, f"{name}: {text}"


def test_suggested_arguments_of_checkpoints_exist() -> None:
    kind = ts.DefaultCheckpointerArguments
    fields = {field.name for field in dataclasses.fields(kind)}
    for name, text in kind.ALIASES.items():
        assert name not in fields
        assert text.partition(",")[0] in fields or text.startswith("trainer.export("), name


@pytest.mark.parametrize("name", ["sabe_every", "xyz", "train_steps_each_epoch_please"])
def test_an_unrelated_name_gets_no_suggestion(name: str) -> None:
    with pytest.raises(ts.ConfigurationError, match="The arguments are activation_checkpointing, "):
        ts.TrainerArguments(**{name: 1})


# --- backend strings


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("dpp", "Did you mean 'ddp'?"),
        ("fdsp", "Did you mean 'fsdp'?"),
        ("fsdp2", "Did you mean 'fsdp'?"),
        ("deepspeed", "Did you mean 'fsdp'?"),
        ("dpsgd", "Did you mean 'dp'?"),
        ("bf16-mixed", "Write 'sp-bf16'."),
        ("16-mixed", "Write 'sp-amp'."),
        ("32", "Write 'sp'."),
        ("ddp_spawn", "Write 'ddp'."),
        ("dp2", "Write 'ddp'."),
        ("cuda", "That is a device. Write backend='sp', device='cuda'."),
        ("gpu", "That is a device. Write backend='sp', device='cuda'."),
        ("cuda:1", "That is a device. Write backend='sp', device='cuda:1'."),
        ("tp", "Write 'fsdp', which shards the parameters."),
        ("qq", "The layers are amp, amp-apex, bf16, ddp, dp, fsdp, sp"),
    ],
)
def test_a_backend_string_of_another_library_is_translated(given: str, sentence: str) -> None:
    with pytest.raises(ts.BackendSpecError) as raised:
        ts.TrainerArguments(backend=given)
    assert sentence in str(raised.value)


def test_an_error_for_a_typo_never_suggests_dp() -> None:
    for slip in ("dd", "d", "pd", "dpx", "dqp", "sdp", "ddpp", "spd"):
        with pytest.raises(ts.BackendSpecError) as raised:
            ts.TrainerArguments(backend=f"sp-{slip}")
        assert "'dp'" not in str(raised.value)


# --- parts in the wrong place


class Lightning(ts.ModuleInterface):
    def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    def configure_optimizers(self) -> Any: ...

    def train_dataloader(self) -> Any: ...


class Hyper(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()  # type: ignore[operator]


class NoSuper(Classifier):
    def __init__(self) -> None:
        self.size = 3


def called(step: Callable[[Any, Any], Any], **named: Any) -> Callable[[Path], Any]:
    kind = type("Broken", (Classifier,), {"train_step": lambda self, global_step, batch, device: step(self, batch)})
    return lambda folder: train(kind(numbers(16), **named), folder)


def scheduled(folder: Path) -> Any:
    class Streamed(Classifier):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return iter([])

        def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            assert self.plan is not None
            return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.plan.total_steps)  # type: ignore[arg-type]

    return train(Streamed(), folder)


def val_step_with(step: Callable[[Any, Any], Any]) -> Callable[[Path], Any]:
    kind = type("Broken", (Classifier,), {"val_step": lambda self, global_step, batch, device: step(self, batch)})
    return lambda folder: train(kind(numbers(16), validate=True), folder)


def backwards(module: Any, batch: Any) -> Any:
    loss = cross_entropy(module.net(batch[0]), batch[1])
    loss.backward()
    return loss


class Trains(nn.Linear):
    def train(self, positive: Any, negative: Any) -> Any: ...  # type: ignore[override]


def with_part(part: nn.Module) -> Classifier:
    module = Classifier(numbers(16))
    module.layers = nn.ModuleList([part])
    return module


ARGUMENTS = ts.TrainerArguments()
LOSS, NET, DATA = nn.CrossEntropyLoss(), nn.Linear(6, 3), numbers(16)
MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "settings of the trainer": (
        lambda folder: ts.Trainer(Classifier(), epochs=3),  # type: ignore[arg-type]
        "Settings go into TrainerArguments: Trainer(module, TrainerArguments(epochs=3)).",
    ),
    "a name of another trainer": (
        lambda folder: ts.Trainer(Classifier(), max_epochs=3),  # type: ignore[arg-type]
        "Trainer has no argument 'max_epochs'. Write epochs.",
    ),
    "a trainer without a module": (
        lambda folder: ts.Trainer(max_epochs=8),  # type: ignore[arg-type]
        "Trainer has no argument 'max_epochs'. Write epochs. Settings go into TrainerArguments: Trainer(module, "
        "TrainerArguments(epochs=8)).",
    ),
    "a trainer without arguments": (
        lambda folder: ts.Trainer(),
        "Trainer was made without a module. Write Trainer(module, TrainerArguments(...)); train() takes no model.",
    ),
    "module and args swapped": (
        lambda folder: ts.Trainer(ARGUMENTS, Classifier()),  # type: ignore[arg-type]
        "module and args have changed places. Write Trainer(module, args).",
    ),
    "a bare model": (
        lambda folder: ts.Trainer(NET, ARGUMENTS),  # type: ignore[arg-type]
        'or wrap the model: SupervisedModule(model, loss, "adamw", dataset).',
    ),
    "callbacks as third argument": (
        lambda folder: ts.Trainer(Classifier(), ARGUMENTS, [ts.Callback()]),  # type: ignore[arg-type]
        "was given a list as its third argument. Write callbacks=[...].",
    ),
    "arguments changed": (
        lambda folder: setattr(ARGUMENTS, "epochs", 5),
        "TrainerArguments cannot be changed. Write dataclasses.replace(args, epochs=5)",
    ),
    "a callback of the package": (lambda folder: ts.EarlyStopping, "Write trainstack.callbacks.EarlyStopping"),
    "a class for Lightning": (
        lambda folder: Lightning(),
        "Lightning has training_step; trainstack calls train_step(self, global_step, batch, device).",
    ),
    "no super().__init__()": (
        lambda folder: ts.Trainer(NoSuper(), ARGUMENTS),
        "NoSuper.__init__ did not call super().__init__().",
    ),
    "called like a network": (
        called(lambda module, batch: cross_entropy(module(batch[0]), batch[1])),
        "Broken was called like a network. Its forward belongs to the trainer. Call the attribute that holds the "
        "network, such as self.net(...).",
    ),
    "called without arguments": (lambda folder: Classifier()(), "Classifier was called like a network."),
    "called by name": (lambda folder: Classifier()(input_ids=1), "Classifier was called like a network."),
    "outputs before the loss": (
        called(lambda module, batch: (module.net(batch[0]), cross_entropy(module.net(batch[0]), batch[1]))),
        "train_step returned a tuple whose first item has shape (8, 3). The first item is the loss",
    ),
    "the loss in the place of the model": (
        lambda folder: ts.SupervisedModule(LOSS, NET, "sgd", DATA),
        "the first argument is the model, the second the loss; a CrossEntropyLoss was given first.",
    ),
    "the learning rate of a module": (
        lambda folder: ts.SupervisedModule(NET, LOSS, "sgd", DATA, lr=0.001),  # type: ignore[arg-type]
        "Write optimizer_kwargs={'lr': 0.001}.",
    ),
    "an option of the loader": (
        lambda folder: ts.SupervisedModule(NET, LOSS, "sgd", DATA, num_workers=2),  # type: ignore[arg-type]
        "Write train_dataloader_kwargs={'num_workers': 2}",
    ),
    "a setting of the run": (
        lambda folder: ts.SupervisedModule(NET, LOSS, "sgd", DATA, epochs=2),  # type: ignore[arg-type]
        "Write TrainerArguments(epochs=2).",
    ),
    "a slip in an argument": (
        lambda folder: ts.SupervisedModule(NET, LOSS, "sgd", train_datasets=DATA),  # type: ignore[arg-type]
        "SupervisedModule has no argument 'train_datasets'. Write train_dataset.",
    ),
    "a function as metric": (
        lambda folder: train(
            ts.SupervisedModule(NET, LOSS, "sgd", DATA, DATA, metrics=lambda scores, labels: 1.0), folder
        ),
        "Wrap the function: metric_of(function).",
    ),
    "a schedule without an end": (
        scheduled,
        "CosineAnnealingLR was made with T_max=None. plan.total_steps is None, because the loader has no length. Set "
        "max_steps",
    ),
    "arguments of a step by other names": (
        lambda folder: train(
            type("Broken", (Classifier,), {"train_step": lambda self, step, batch, dev: None})(), folder
        ),
        "The arguments of train_step are passed by name.",
    ),
    "a list of validation loaders": (
        lambda folder: train(
            type(
                "Broken",
                (Classifier,),
                {"get_val_dataloaders": lambda self, sampler, batch_size: [DataLoader(DATA), DataLoader(DATA)]},
            )(),
            folder,
        ),
        'return {"a": loader_a, "b": loader_b}.',
    ),
    "a seed in quotes": (lambda folder: ts.seed_everything("0"), "seed='0': write a whole number."),  # type: ignore[arg-type]
    "several settings of the trainer": (
        lambda folder: ts.Trainer(Classifier(), max_epochs=8, precision="bf16", epochs=2),  # type: ignore[arg-type]
        "Trainer has no argument 'max_epochs'. Write epochs. Settings go into TrainerArguments: Trainer(module, "
        "TrainerArguments(epochs=8)). Trainer has no argument 'precision'. Write backend=\"auto-bf16\"",
    ),
    "several wrong arguments": (
        lambda folder: ts.TrainerArguments(max_epochs=8, lr=0.1),  # type: ignore[call-arg]
        "'max_epochs'. Write epochs. TrainerArguments has no argument 'lr'. Write it where the module makes",
    ),
    "a test of the best checkpoint": (
        lambda folder: ts.Trainer(Classifier()).test(ckpt_path="best"),  # type: ignore[arg-type]
        "Trainer.test has no argument 'ckpt_path'. The weights are those of the module. For the best checkpoint, call "
        'trainstack.warm_start(trainer.module, f"{trainer.checkpointer.save_dir}/best", strict=True) before.',
    ),
    "a validation of a checkpoint": (
        lambda folder: ts.Trainer(Classifier()).validate(ckpt_path="best"),  # type: ignore[arg-type]
        "Trainer.validate has no argument 'ckpt_path'. The weights are",
    ),
    "a prediction with an unknown argument": (
        lambda folder: ts.Trainer(Classifier()).predict(DATA, batchsize=2),  # type: ignore[arg-type]
        "Trainer.predict has no argument 'batchsize'. It takes data, keep_outputs, batch_size,",
    ),
    "options of the log": (
        called(lambda module, batch: module.log("loss", 1.0, prog_bar=True, on_epoch=True)),
        "self.log has no argument 'prog_bar', 'on_epoch'. Write self.log('loss', value).",
    ),
    "the checkpoint of a class": (
        lambda folder: Classifier.load_from_checkpoint("last.ckpt"),  # type: ignore[attr-defined]
        "Classifier has no load_from_checkpoint. Make the module, and call trainstack.warm_start(module, path, "
        "strict=True).",
    ),
    "the module of Lightning": (lambda folder: ts.LightningModule, "Write trainstack.ModuleInterface"),
    "the checkpoints of Lightning": (lambda folder: ts.ModelCheckpoint, "Write TrainerArguments(checkpointer_args="),
    "a logger of Lightning": (lambda folder: ts.CSVLogger, 'Write TrainerArguments(writers=["csv"])'),
    "the data of Lightning": (lambda folder: ts.LightningDataModule, "Write get_train_dataloader and"),
    "an option of EarlyStopping": (
        lambda folder: ts.callbacks.EarlyStopping("val/loss", verbose=True),  # type: ignore[arg-type]
        "EarlyStopping has no argument 'verbose'. The arguments are monitor, mode, patience,",
    ),
    "the number of best checkpoints": (
        lambda folder: ts.DefaultCheckpointerArguments(save_top_k=2, dirpath="x"),  # type: ignore[call-arg]
        "DefaultCheckpointerArguments has no argument 'save_top_k'. Write keep_best, a number such as 2. "
        "DefaultCheckpointerArguments has no argument 'dirpath'. Write save_dir.",
    ),
    "a part with its own train": (
        lambda folder: train(with_part(Trains(2, 2)), folder),
        "the part 'layers.0' (Trains) defines train, which cannot be called with a mode",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_its_correction(mistake: str, tmp_path: Path) -> None:
    make, sentence = MISTAKES[mistake]
    with pytest.raises((ts.TrainstackError, AttributeError)) as raised:
        make(tmp_path)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (called(lambda module, batch: module.device), "Broken has no device. Steps get it as an argument"),
        (called(lambda module, batch: module.trainer.global_step), "Broken has no trainer. Hooks of a Callback get it"),
        (lambda folder: Hyper(), "Hyper has no save_hyperparameters. Set self.hyperparameters in __init__."),
        (lambda folder: Classifier().load_from_checkpoint, "Classifier has no load_from_checkpoint. Make the module"),
        (called(lambda module, batch: module.log_dict({})), "Broken has no log_dict. Call self.log(name, value)"),
        (called(lambda module, batch: module.print(1)), "Broken has no print. Write trainstack.print_once(...)"),
        (called(lambda module, batch: module.current_epoch), "Broken has no current_epoch. on_begin_train_epoch("),
        (val_step_with(backwards), "gradients are off in val_step. Write `with torch.enable_grad():`"),
    ],
)
def test_an_error_within_a_step_has_an_explanation(make: Callable[[Path], Any], note: str, tmp_path: Path) -> None:
    with pytest.raises((AttributeError, RuntimeError)) as raised:
        make(tmp_path)
    assert any(note in one for one in raised.value.__notes__)


def test_a_missing_attribute_of_another_object_has_no_explanation(tmp_path: Path) -> None:
    with pytest.raises(AttributeError) as raised:
        called(lambda module, batch: module.net.device)(tmp_path)
    assert not any("Steps get it" in one for one in raised.value.__notes__)


def test_a_slip_in_the_name_of_a_class_gets_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttributeError) as raised:
        _ = ts.Trianer
    sys.__excepthook__(raised.type, raised.value, None)
    assert "Did you mean: 'Trainer'?" in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_instead_of_a_folder_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpoints = ts.DefaultCheckpointerArguments()
    with pytest.raises(ts.CheckpointError, match=r"file is a file\. Write the path of a folder"):
        train(Classifier(numbers(16)), tmp_path / "file" / below, checkpointer_args=checkpoints)


def test_a_trainer_without_arguments_has_the_default_ones() -> None:
    assert ts.Trainer(Classifier()).args == ts.TrainerArguments()


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_pointer_is_read_like_its_checkpoint(name: str, tmp_path: Path) -> None:
    trainer = ts.Trainer(
        Classifier(numbers(16), validate=True),
        arguments(tmp_path, epochs=2, checkpointer_args=ts.DefaultCheckpointerArguments()),
    )
    trainer.train()
    folder = tmp_path / "checkpoints"
    (newest,) = [path for path in folder.iterdir() if path.name == "checkpoint-000000004"]
    assert (folder / name).is_file()
    found, expected = ts.read_model(folder / name), ts.read_model(newest)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    ts.verify_checkpoint(folder / name)


@pytest.mark.parametrize(("dtype", "said"), [(torch.float64, True), (torch.float32, False)])
def test_a_precision_layer_without_effect_is_logged(
    dtype: torch.dtype, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainstack")
    train(Classifier(numbers(16, dtype=dtype), dtype=dtype), tmp_path, backend="sp-bf16", log_level="INFO")
    assert ("all parameters are float64, and the layer 'bf16'" in caplog.text) is said


@pytest.mark.parametrize(
    ("wrap", "planned", "said"),
    [(iter, 4, True), (iter, 8, False), (iter, 1, False), (lambda batches: ts.as_is(batches), 4, False)],
)
def test_a_batch_of_an_unplanned_size_is_logged(
    wrap: Any, planned: int, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Classifier):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return wrap([next(iter(DataLoader(numbers(16), 8)))] * 3)

    train(Own(), tmp_path, train_batch_size=planned)
    assert caplog.text.count(f"the first global step has 8 samples, and train_batch_size={planned}") == int(said)


def test_hooks_of_other_libraries_are_logged_with_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Hooked(Classifier):
        def on_train_epoch_start(self) -> None: ...

        def on_validation_epoch_end(self) -> None: ...

    train(Hooked(numbers(16)), tmp_path)
    text = " ".join(caplog.messages)
    for name, meant in (
        ("on_train_epoch_start", "on_begin_train_epoch("),
        ("on_validation_epoch_end", "on_end_val_epoch("),
    ):
        assert f"Hooked.{name} is not a hook and is never called by the trainer. Write {meant}" in text


def test_suggested_hooks_exist() -> None:
    hooks = {event.method for event in ts.Event} | {name for name in dir(ts.ModuleInterface) if name.startswith("on_")}
    for name, text in OTHER_HOOKS.items():
        assert name not in hooks, name
        assert text.partition("(")[0] in hooks | {"get_callbacks"}, text


def test_a_metric_without_a_loss_is_logged_with_advice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    val_step_with(lambda module, batch: {"val_acc": torch.tensor(0.5)})(tmp_path)
    assert "For a metric, call self.log('val_acc', ...) in val_step." in " ".join(caplog.messages)


def test_the_suggested_call_evaluates_the_best_checkpoint(tmp_path: Path) -> None:
    keeping = ts.DefaultCheckpointerArguments(monitor="val/loss", mode="max")  # the worst loss, which is the first
    module = Classifier(numbers(16), validate=True)
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=3, checkpointer_args=keeping))
    losses: list[float] = []
    trainer.on(ts.Event.EPOCH_END)(lambda trainer: losses.append(trainer.history.get_latest_metric("val/loss")))
    trainer.train()
    ts.warm_start(trainer.module, f"{trainer.checkpointer.save_dir}/best", strict=True)  # type: ignore[attr-defined]
    assert trainer.validate().metrics["val/loss"] == max(losses) != losses[-1]
