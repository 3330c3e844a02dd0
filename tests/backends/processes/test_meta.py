"""Modules that were built on the meta device have the values of a construction on the CPU, under each backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.processes import run_world
from tests.helpers.workers import meta
from trainstack.backends.sharding.meta import initialize_meta
from trainstack.checkpointing.weights import export_model
from trainstack.errors import ModuleContractError

WORLD = ts.World(device=torch.device("cpu"))


class Attention(nn.Module):
    """A block whose own parameter is initialized after those of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.heads = nn.MultiheadAttention(8, 2)
        self.embedding = nn.Embedding(5, 4, padding_idx=1)
        self.bias = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.bias)


class Visits(nn.Module):
    """Initializes all parts a second time in the constructor, with a call for each part; one call changes a child."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        self.apply(self._init_weights)

    def _init_weights(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight)
        if isinstance(part, nn.Sequential):
            nn.init.normal_(part[0].weight, std=0.1)


class Replaces(nn.Module):
    """Replaces a buffer, and draws random numbers of other lengths than those that it keeps."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table = torch.randn(8)[:4]


def build_all() -> nn.Module:
    return nn.Sequential(Attention(), Visits(), nn.LSTM(3, 4, 2), Replaces(), nn.Linear(2, 2))


def test_values_and_random_numbers_equal_a_construction_on_the_cpu() -> None:
    torch.manual_seed(1)
    expected, drawn = build_all(), torch.rand(3)

    torch.manual_seed(1)
    with torch.device("meta"):
        module = build_all()
    initialize_meta(module, WORLD)

    assert torch.equal(torch.rand(3), drawn)
    named = dict([*expected.named_parameters(), *expected.named_buffers()])
    assert list(named) == [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert torch.equal(tensor, named[name]), name
        assert tensor.requires_grad == named[name].requires_grad
    assert torch.equal(module[2](torch.ones(1, 3))[0], expected[2](torch.ones(1, 3))[0])  # it keeps a list of weights


def test_tensors_with_values_keep_them() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = nn.Parameter(torch.tensor([5.0, 6.0]), requires_grad=False)
    module[1].bias = kept
    initialize_meta(module, WORLD)

    assert module[1].bias is kept
    assert kept.tolist() == [5.0, 6.0]
    assert module[1].weight.abs().sum() > 0


def test_tied_tensors_stay_tied() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4))
        module[1].weight = module[0].weight
        module[0].weight.is_special = True  # type: ignore[attr-defined]
    initialize_meta(module, WORLD)

    assert module[1].weight is module[0].weight
    assert module[0].weight.is_special
    assert module[0].weight.std() > 0.4  # of the embedding, which comes first


@pytest.mark.parametrize("kind", ["parameter", "plain", "shape"])
def test_a_part_that_cannot_be_initialized_is_refused_by_name(kind: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "plain":
                self.table = torch.ones(3)
            else:
                self.gain = nn.Parameter(torch.ones(3))

    if kind == "shape":
        Odd.reset_parameters = lambda self: setattr(self, "gain", nn.Parameter(torch.ones(4)))  # type: ignore[attr-defined]
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Odd())

    words = {"parameter": "1.gain was built on the meta device.*reset_parameters.*in Odd", "plain": "1.table is a"}
    with pytest.raises(ModuleContractError, match=words.get(kind, r"1.gain has the shape \(3,\)")):
        initialize_meta(module, WORLD)


def test_one_process_trains_a_module_from_the_meta_device() -> None:
    assert meta.trained("meta", "sp") == meta.trained("cpu", "sp")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("backend", "size"), [("ddp", 2), pytest.param("fsdp", 2, marks=pytest.mark.long), ("fsdp", 3)]
)
def test_ranks_train_meta_modules_as_modules_from_the_cpu(backend: str, size: int) -> None:
    expected = run_world(size, meta.trained, on="cpu", backend=backend)

    assert run_world(size, meta.trained, on="meta", backend=backend) == expected
    assert expected[-1]["begin"] == meta.trained("cpu", "sp", epochs=1)["begin"]


@pytest.mark.distributed
@pytest.mark.parametrize("strict", [True, False])
def test_weights_are_loaded_into_shards(strict: bool, tmp_path: Path) -> None:
    source = meta.built("cpu", seed=77)
    state: dict[str, Any] = source.state_dict()
    if not strict:
        state |= {"4.weight": torch.zeros(2, 2), "another": torch.zeros(1)}
        del state["1.gain"]
    export_model(state, tmp_path / "export")
    options: dict[str, Any] = {"source": str(tmp_path / "export"), "strict": strict}
    expected = meta.started(on="cpu", backend="sp", **options)

    for rank in run_world(2, meta.started, on="meta", backend="fsdp", **options):
        assert rank["begin"] == expected["begin"]
        assert rank["report"] == expected["report"]
        assert rank["end"] == pytest.approx(expected["end"], rel=0, abs=1e-10)


@pytest.mark.distributed
def test_a_run_continues_in_a_module_on_the_meta_device(tmp_path: Path) -> None:
    whole = meta.resumed(str(tmp_path / "whole"), "cpu", "sp", 12)

    for backend, size, steps in (("fsdp", 3, 4), ("sp", 1, 7), ("fsdp", 2, 12)):
        options = {"directory": str(tmp_path / "run"), "on": "meta", "backend": backend, "max_steps": steps}
        ranks = [meta.resumed(**options)] if size == 1 else run_world(size, meta.resumed, **options)

    for rank in ranks:
        assert rank == pytest.approx(whole, rel=0, abs=1e-10)


@pytest.mark.distributed
@pytest.mark.parametrize(("route", "on"), [("instance", "cpu"), ("hook", "meta")])
def test_an_early_optimizer_is_refused_with_the_factory_to_write(route: str, on: str) -> None:
    for error in [*run_world(2, meta.early, route=route, on=on), meta.early(route, "meta", "sp")]:
        assert error.startswith("ModuleContractError: optimizer 0 (SGD) holds 12 parameters that were replaced")
        assert "optimizer=lambda parameters: SGD(parameters, lr=0.1)" in error
