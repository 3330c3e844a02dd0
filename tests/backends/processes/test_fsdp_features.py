"""Features apart from training give the same numbers under `fsdp`, or are refused when training begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import arguments
from tests.helpers.processes import run_world
from tests.helpers.workers import sharded_features
from tests.helpers.workers.sharded_features import EQUAL, OPTIMIZERS, optimizes, run
from tests.helpers.workers.sharded_models import Block, Language, tied_blocks
from trainstack.backends import SingleProcess
from trainstack.backends.fsdp import FSDP
from trainstack.backends.model_units import find_units
from trainstack.errors import ConfigurationError

REFUSED = {
    "yields": ["'fsdp' supports one", "several updates"],
    "minimises": ["LBFGS evaluates a closure, which 'fsdp' cannot"],
    "fits": ["fit_micro_batch=True: each pass of a sharded module", "gpu_batch_size_limit"],
    "replicates": ["{'replicate': 3}", "Write one of 1, 2"],
    "offloads": ["cpu_offload=True on the device 'cpu'"],
    "gathers_low": ["Write 'fsdp-bf16'"],
}


def flat(values: Any) -> list[float]:
    return [item for value in values for item in flat(value)] if isinstance(values, list) else [values]


@pytest.mark.distributed
def test_features_give_the_numbers_of_one_process_or_are_refused(tmp_path: Path) -> None:
    names = [one.__name__ for one in EQUAL]
    expected = run(names, "sp", str(tmp_path / "sp"))
    chosen = {"names": [*names, *REFUSED], "directory": str(tmp_path / "fsdp")}

    for rank in run_world(2, sharded_features.run, backend="fsdp", timeout=60, **chosen):
        for name in names:
            assert flat(rank[name]) == pytest.approx(flat(expected[name]), rel=0, abs=1e-10), name
        for name, words in REFUSED.items():
            assert rank[name].startswith("ConfigurationError: ")
            for word in words:
                assert word in rank[name]


@pytest.mark.distributed
def test_each_torch_optimizer_equals_one_process_or_is_refused(tmp_path: Path) -> None:
    expected = optimizes("sp", str(tmp_path / "sp"), list(OPTIMIZERS))
    chosen = {"names": list(OPTIMIZERS), "directory": str(tmp_path / "fsdp")}

    for rank in run_world(2, sharded_features.optimizes, backend="fsdp", timeout=60, **chosen):
        refused = {name for name, found in rank.items() if isinstance(found, str)}
        assert refused == {"Adafactor", "Muon", "Rprop"}
        for name, found in rank.items():
            if name in refused:
                assert f"backend 'fsdp' with the optimizer {name}" in found
            else:
                assert found == pytest.approx(expected[name], rel=0, abs=1e-10), name


# --- units


class Holds(nn.Module):
    """Names the modules of a `Language` in a method."""

    def __init__(self, model: nn.Module, units: Callable[[nn.Module], Any] | None = None) -> None:
        super().__init__()
        self.model = model
        if units is not None:
            self.sharding_units = lambda: units(model)


def names_of(module: nn.Module, units: list[nn.Module]) -> list[str]:
    return [name for name, part in module.named_modules() if any(part is unit for unit in units)]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Language(), ["model.blocks.0", "model.blocks.1"]),
        (nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), ["model.0", "model.2"]),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.LayerNorm(2)), []),
        (nn.Sequential(nn.Linear(2, 2), Block(), Block()), ["model.1", "model.2"]),
        (nn.ModuleDict({"a": nn.ModuleList([Block()]), "b": Block()}), ["model.a.0"]),
        (nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block())), ["model.0.0", "model.0.1"]),
    ],
)
def test_units_are_the_blocks_that_are_repeated(model: nn.Module, names: list[str]) -> None:
    module = Holds(model)

    assert names_of(module, find_units(module)) == names


def test_units_may_be_named_by_module_class_and_name() -> None:
    module = Holds(Language(), lambda model: [model.head, "Block"])

    assert names_of(module, find_units(module)) == ["model.blocks.0", "model.blocks.1", "model.head"]
    assert names_of(module, find_units(module, [nn.Embedding])) == ["model.table"]
    assert find_units(module, []) == []


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["model.blocks.0", "model.blocks.1"]),
        ({"find_unused_parameters": True}, []),
        ({"units": nn.Embedding}, ["model.table"]),
        ({"units": nn.Embedding, "find_unused_parameters": True}, ["model.table"]),
    ],
)
def test_unused_parameters_allow_no_units_by_default(options: dict[str, Any], names: list[str]) -> None:
    module = Holds(Language())

    assert names_of(module, FSDP(SingleProcess(), **options).gathered_parts(module)) == names


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (["Attention"], ["'Attention': no module has this name or class", "Block"]),
        (["model.blocks"], ["'model.blocks' is an nn.ModuleList, which no forward pass calls"]),
        (["Block"], ["shared by model.blocks.0 and model.blocks.2"]),
        (["model.blocks.0"], ["shared by model.blocks.0 and the part outside of units"]),
    ],
)
def test_impossible_units_are_refused(units: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        find_units(Holds(tied_blocks()), units, option="units")
    for word in words:
        assert word in str(refused.value)


# --- features that need an accelerator, with fakes


class FakeWorld:
    """The world of a process with an accelerator."""

    device = torch.device("cuda", 0)


def test_cpu_offload_needs_an_accelerator_and_groups_for_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    from trainstack.backends import fsdp
    from trainstack.backends.sharding.units import Sharding

    stack: Any = ts.build_trainer_backend("fsdp", fsdp={"cpu_offload": True})
    config = "cuda:nccl"
    monkeypatch.setattr(fsdp.dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(fsdp.dist, "get_backend", lambda: "nccl")
    with pytest.raises(ConfigurationError, match=r"on the device 'cpu': parameters are in host memory already"):
        stack._check_offload(torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=r"Create it with backend='cpu:gloo,cuda:nccl'"):
        stack._check_offload(FakeWorld.device)
    config = "cpu:gloo,cuda:nccl"
    stack._check_offload(FakeWorld.device)

    assert stack._collective_backend(FakeWorld.device) == "cpu:gloo,cuda:nccl"
    assert stack._collective_backend(torch.device("cpu")) == "gloo"
    assert isinstance(Sharding(cpu_offload=True).offload, CPUOffloadPolicy)


def test_norms_are_not_replaced_in_a_sharded_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainstack.trainer.callbacks import settings

    class FakeTrainer:
        world = type("World", (), {"size": 2})
        device = torch.device("cuda", 0)
        module = Language()

    monkeypatch.setattr(settings, "has_shards", lambda module: True)
    with pytest.raises(ConfigurationError, match="SyncBatchNorm: the module is sharded already"):
        ts.callbacks.SyncBatchNorm().on_ready(FakeTrainer())  # type: ignore[arg-type]


def test_a_string_with_fsdp_is_explained(tmp_path: Path) -> None:
    told = ts.explain("fsdp-bf16")

    assert "shards parameters, gradients and optimizer states" in told
    assert "one reduce-scatter a unit each global step, and with replicas one all-reduce" in told
    with pytest.raises(ConfigurationError, match="does not take the options"):
        ts.Trainer(sharded_features.module(), arguments(tmp_path, backend="fsdp", backend_options={"fsdp": {"x": 1}}))
