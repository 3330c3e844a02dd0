"""Arguments are checked at construction: every field, and every function that takes a path."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import REPRODUCIBLE, Classifier, arguments, numbers, train
from trainstack.trainer import CsvWriter

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
PLACE = ts.DistributedTrainingArguments(local_rank=0, global_rank=0, world_size=1)

WRONG: dict[str, list[Any]] = {
    "epochs": [-1, 1.5, "1", True, None],
    "max_steps": [0, 1.5, -1, "all", True],
    "max_time": [0, -1.0, "1h", "1:60:00", "", True, float("nan"), float("inf"), []],
    "train_batch_size": [0, -4, 2.0, None],
    "per_device_train_batch_size": [0, 1.5, "8"],
    "gpu_batch_size_limit": [0, 2.5, "8"],
    "fit_micro_batch": [1, "always", None],
    "val_batch_size": [0, 1.5, "8"],
    "max_train_steps_per_epoch": [0, 1.5, True],
    "max_val_steps_per_epoch": [0, 1.5, True],
    "validate_every": [1.5, "epoch", True, [1]],
    "validate_at_start": [1, "yes", None],
    "sanity_val_steps": [-2, 1.0, None],
    "overfit_batches": [-2, 1.5, "1"],
    "fast_dev_run": [0, -1, 1.5, "yes"],
    "monitor": ["", 1, "score"],
    "monitor_mode": ["maximum", "MAX", None, True],
    "clip_grads": [1, "yes", None],
    "max_grad_norm": [0.0, -1.0, None, "1", float("nan"), True],
    "clip_grad_value": [0.0, -1.0, "1", float("nan"), True],
    "combine_loaders": ["longest", True, 1],
    "data_sharding": ["rank", None, True, ["loader"], {"train": "rank"}, {"train": None}, {"fit": "loader"}],
    "nonfinite": ["ignore", None, True],
    "backend": ["", "spp", "bf16", "sp-bf16-amp", "auto-auto", "zero", None, 3],
    "backend_options": [None, {"amp": {}}, {"sp": 1}, {"auto": {}}, []],
    "device": ["toaster", "", "meta", torch.device("meta"), -2, [], [-1, 0], ["cpu", "toaster"], 1.5, True, None],
    "use_gpu": [1, "no", None],
    "seed": [-1, 1.5, 2**63, 2**70, None, True],
    "seed_everything": [1, None, "yes"],
    "verify_replay": [-0.1, 1.5, "0.01", True, None, float("nan")],
    "on_replay_mismatch": ["ignore", None, True],
    "deterministic": ["yes", 2, None],
    "float32_matmul_precision": ["tf32", True, 1],
    "compile": ["inductor", 1, None, {"backned": "eager"}, {"model": nn.Linear(1, 1)}],
    "activation_checkpointing": [1, None],
    "channels_last": [1, None],
    "fast_paths": [0, None],
    "resume": ["", "True", "no", 1.5, None, "s3://bucket/run", Path("gs://bucket/run"), "~nobody-here/run"],
    "resume_mode": ["all", None, True],
    "strict_resume": [1, None, "yes"],
    "init_weights_from": [1, True, "", "hf://repo/model", "~nobody-here/x"],
    "init_weights_strict": [1, None],
    "reset_optimizers_schedulers": [1, None],
    "checkpointer_args": [None, {"keep_lst": 3}, True],
    "output_dir": ["", 1, "hf://repo/run", "s3://", "file:///run", "~nobody-here/run"],
    "local_dir": ["", "here"],
    "overwrite": [1, None, "yes"],
    "private_files": [1, None, "yes"],
    "log_every": [0, 1.5, -1, "10", True],
    "writers": ["csv", None, 1, ["nope"], ["aml"], ["csv", "csv"], [CsvWriter], [1], ["CSV"]],
    "report": ["yes", None, 2],
    "record": ["all", None, True],
    "progress": ["bar", 1, True],
    "default_callbacks": [1, None],
    "disable_tqdm": [1, None],
    "collect_train_outputs": ["yes", None, 2],
    "handle_signals": [1, None],
    "stop_grace_s": [0, -1.0, "30", float("nan"), True],
    "rank_zero_timeout_s": [0, -1.0, "30", float("nan"), True, None],
    "lease_timeout_s": [0, -1.0, "30", float("nan"), True, None, 86_401, float("inf")],
    "on_interrupt": ["stop", None, True],
    "save_on_exception": [1, None, (3,)],
    "log_level": ["LOUD", "info", 10, None],
    "stats_args": [{"log_stps": 3}, True, ts.StatsArguments(log_steps=0)],
    "writer_args": [{"tb_dir": "runs"}, "runs"],
    "distributed_training_args": [{"rank": 0}, True],
    "differential_privacy_args": [{}, REPRODUCIBLE],
    "amp_backend_native": [True, 1, None],
    "amp_backend_apex": [True, 1, None],
    "amp_level_apex": ["O4", "O2", None],
}


def test_the_table_has_wrong_values_for_every_argument() -> None:
    assert list(WRONG) == [field.name for field in dataclasses.fields(ts.TrainerArguments)]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_at_construction(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ts.ConfigurationError):
        ts.TrainerArguments(**{name: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cuda:7"},  # the run checks whether the machine has this device
        {"device": [0, 1]},
        {"device": -1},
        {"seed": 2**63 - 1},
        {"writers": []},
        {"compile": {"mode": "max-autotune", "fullgraph": True}},
        {"backend": "auto-amp", "backend_options": {"amp": {"init_scale": 1.0}}},
        {"distributed_training_args": PLACE},
        {"resume": Path("nowhere")},
        {"output_dir": "a:b/c"},
        {"output_dir": "C:/runs"},
        {"output_dir": Path("s3:")},
    ],
    ids=str,
)
def test_valid_values_are_accepted_and_survive_a_round_trip(changes: dict[str, Any]) -> None:
    args = ts.TrainerArguments(**changes)
    assert ts.TrainerArguments.from_dict(args.to_dict()).to_dict() == args.to_dict()


# --- the monitor ---------------------------------------------------------------------------------------------


def test_a_mode_without_a_monitor_applies_to_the_checkpointer() -> None:
    saving = ts.DefaultCheckpointerArguments(monitor="val/accuracy")
    args = ts.TrainerArguments(monitor_mode="min", checkpointer_args=saving)
    assert (args.placed_checkpointer_args.monitor, args.placed_checkpointer_args.mode) == ("val/accuracy", "min")

    with pytest.raises(ts.ConfigurationError, match=r"monitor_mode='min' and checkpointer_args.mode='max' contradict"):
        ts.TrainerArguments(monitor_mode="min", checkpointer_args=dataclasses.replace(saving, mode="max"))


# --- paths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["save_dir", "model_state_save_dir", "load_dir", "load_filename"])
def test_paths_of_the_checkpointer_must_be_local(field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ts.ConfigurationError, match=rf"{field}='s3://bucket/run' is an address, and only local paths"):
        ts.DefaultCheckpointerArguments(**{field: "s3://bucket/run"})

    assert getattr(ts.DefaultCheckpointerArguments(**{field: "~/run"}), field) == str(tmp_path / "run")


def test_a_log_directory_must_be_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ts.ConfigurationError, match=r"writer_args.tb_log_dir='gs://bucket' is an address"):
        ts.WriterArguments(tb_log_dir="gs://bucket")
    assert ts.WriterArguments(tb_log_dir="~/logs").tb_log_dir == str(tmp_path / "logs")


FUNCTIONS: dict[str, Callable[[str], Any]] = {
    "export_model": lambda path: ts.export_model(nn.Linear(1, 1), path),
    "read_model": ts.read_model,
    "verify_checkpoint": ts.verify_checkpoint,
    "list_checkpoints": ts.list_checkpoints,
    "warm_start": lambda path: ts.warm_start(nn.Linear(1, 1), path),
    "load_torch_weights": ts.load_torch_weights,
    "read_history": ts.read_history,
    "CsvWriter": CsvWriter,
    "save_checkpoint": lambda path: trained().save_checkpoint(path=path),
}


def trained() -> ts.Trainer:
    return train(Classifier(numbers(8)), "out")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_with_a_path_refuses_an_address(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ts.ConfigurationError, match="'s3://bucket/x' is an address, and only local paths"):
        FUNCTIONS[name]("s3://bucket/x")
    assert not (tmp_path / "s3:").exists()


def test_a_tilde_in_paths_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    saving = ts.DefaultCheckpointerArguments()
    train(Classifier(numbers(8)), "~/run", checkpointer_args=saving)
    train(Classifier(numbers(8)), "~/run", checkpointer_args=saving, epochs=2, resume="~/run/checkpoints/last")
    trainer = train(Classifier(numbers(8)), "~/other", init_weights_from="~/run/checkpoints/last")
    trainer.export("~/exported")

    assert sorted(os.listdir(tmp_path)) == ["exported", "run"]


def test_a_missing_resume_path_is_refused_before_data_are_loaded(tmp_path: Path) -> None:
    class Loads(Classifier):
        def get_train_dataloader(self, *sizes: Any) -> Any:
            raise AssertionError("the data are loaded")

    with pytest.raises(
        ts.CheckpointNotFoundError, match=r"resume='.*nowhere/at/all': .*/nowhere/at/all does not exist"
    ):
        ts.Trainer(Loads(), arguments(tmp_path, resume=str(tmp_path / "nowhere/at/all")))

    trainer = ts.Trainer(Loads(), arguments(tmp_path, resume="nowhere-at-all"))
    with pytest.raises(ts.CheckpointNotFoundError, match="nowhere-at-all"):
        trainer.train()


def test_a_checkpointer_may_define_custom_resume_names(tmp_path: Path) -> None:
    class ById(ts.DefaultCheckpointer):
        def load(self, resume: Any = None) -> ts.Checkpoint:
            assert resume == "team/run-3"
            return ts.Checkpoint()

    train_args = arguments(tmp_path, resume="team/run-3")
    saving = ts.DefaultCheckpointerArguments(save_dir=str(tmp_path / "checkpoints"))
    ts.Trainer(Classifier(numbers(8)), train_args, checkpointer=ById(saving)).train()


def test_only_the_main_process_checks_the_resume_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    ts.Trainer(Classifier(), arguments(tmp_path, resume=str(tmp_path / "local/to/rank/0")))


# --- backend="auto" ------------------------------------------------------------------------------------------


def test_the_default_backend_is_sp_without_a_launcher(tmp_path: Path) -> None:
    args = ts.TrainerArguments()
    assert (args.backend, args.resolved_backend) == ("auto", "sp")
    trainer = ts.Trainer(Classifier(), arguments(tmp_path))
    assert trainer.trainer_backend.spec == "sp"
    assert ts.explain("auto") == ts.explain("sp")
    assert ts.explain("auto-bf16") == ts.explain("sp-bf16")


def test_the_default_backend_is_ddp_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    made_before = ts.TrainerArguments()
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert made_before.resolved_backend == ts.TrainerArguments().resolved_backend == "ddp"
    assert ts.TrainerArguments(backend="auto-bf16").resolved_backend == "ddp-bf16"
    assert ts.TrainerArguments(backend="sp").resolved_backend == "sp"
    with pytest.raises(ts.ConfigurationError, match="backend 'sp' in a world of 2 processes"):
        ts.build_trainer_backend("sp").open("cpu")


def test_the_default_backend_is_ddp_with_a_given_rank() -> None:
    args = ts.TrainerArguments(distributed_training_args=PLACE)
    assert args.resolved_backend == "ddp"
    assert args.layer_options == {"ddp": {"place": PLACE}}


def test_an_incomplete_launcher_environment_is_refused_with_both_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ts.ConfigurationError, match=r"backend 'auto': LOCAL_RANK='1' is set.*write backend='sp'"):
        ts.TrainerArguments()
    ts.TrainerArguments(backend="sp")


def test_no_layer_can_be_called_auto() -> None:
    with pytest.raises(ts.ConfigurationError, match="this token is taken"):
        ts.register_layer("auto")
    with pytest.raises(ts.ConfigurationError, match="this name is taken"):
        ts.register_trainer_backend("auto", lambda: None)  # type: ignore[arg-type, return-value]


def test_a_resume_may_exchange_auto_and_sp(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    data = TensorDataset(torch.randn(16, 2), torch.randn(16, 1))

    def train_to(epochs: int, backend: str, **changes: Any) -> None:
        module = ts.SupervisedModule(nn.Linear(2, 1), nn.MSELoss(), "sgd", data)
        args = ts.TrainerArguments(
            backend=backend, epochs=epochs, train_batch_size=8, output_dir=tmp_path, progress="none", **changes
        )
        ts.Trainer(module, args).train()

    train_to(1, "auto")
    assert "backend sp on cpu" in " ".join(capsys.readouterr().out.split())
    assert ts.list_checkpoints(tmp_path / "checkpoints")[0].global_step == 2
    assert '"backend": "sp"' in (tmp_path / "run.json").read_text()
    train_to(2, "sp", resume=True)
    train_to(3, "auto", resume=True)

    assert not [record for record in caplog.records if record.levelname == "WARNING"]
