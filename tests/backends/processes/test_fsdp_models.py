"""`fsdp` on 2 and 4 ranks equals `sp`: models with tied, frozen and shared parts, and each option."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.processes import run_world
from tests.helpers.workers import sharded_models
from tests.helpers.workers.sharded_models import MODELS, train

UNUSED = {"fsdp": {"find_unused_parameters": True}}
EXPERTS: dict[str, Any] = {"name": "experts in a block", "backend_options": UNUSED}
FEW_BLOCKS = {"tied blocks": [1], "shared part": [1], "one block in all places": [0], "frozen parts": [0, 1, 2]}


def options(**given: Any) -> dict[str, Any]:
    return {"backend_options": {"fsdp": given}}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], *, abs_: float = 1e-10) -> None:
    for what in ("weights", "losses", "norms"):
        assert found[what] == pytest.approx(expected[what], rel=0, abs=abs_), what


@pytest.mark.distributed
@pytest.mark.parametrize("older_torch", [False, True])
def test_models_with_shared_and_frozen_parts_end_as_one_process(older_torch: bool) -> None:
    """Without `set_reduce_scatter_unused_params` the layer adds zeros itself, as torch 2.10 to 2.12 need it."""
    names = sorted(set(MODELS) - {"buffers", "experts in a block"})
    names = ["frozen parts", "used twice"] if older_torch else names
    runs = [{"name": name} for name in names] + [EXPERTS]
    expected = [train(run["name"], "sp") for run in runs]

    for rank in run_world(2, sharded_models.train_all, runs=runs, older_torch=older_torch, timeout=60):
        for run, found, wanted in zip(runs, rank, expected, strict=True):
            assert_equal(found, wanted)
            if run["name"] in FEW_BLOCKS:
                assert found["units"] == [f"model.blocks.{n}" for n in FEW_BLOCKS[run["name"]]]


@pytest.mark.distributed
def test_each_option_gives_the_weights_of_one_process() -> None:
    named = ["model.head", "Block"]
    runs: list[dict[str, Any]] = [
        {"name": "plain", **options(replicate=2)},
        {"name": "tied", **options(reshard_after_forward=False)},
        {"name": "plain", "units": named},
        {"name": "plain", **options(units=named)},
        {"name": "tied", **options(reduce_each_pass=True)},
        {"name": "plain", "activation_checkpointing": True},
        {"name": "tied", "compile": {"units": True, "backend": "eager"}},
    ]
    expected = {name: train(name, "sp") for name in ("plain", "tied")}

    for rank in run_world(2, sharded_models.train_all, runs=runs, timeout=60):
        for run, found in zip(runs, rank, strict=True):
            assert_equal(found, expected[run["name"]])
        assert rank[2]["units"] == rank[3]["units"] == ["model.blocks.0", "model.blocks.1", "model.head"]
        assert rank[-1]["graphs"][0] > 0


@pytest.mark.distributed
def test_two_replicas_of_two_shards_end_as_one_process() -> None:
    runs = [{"name": "tied", **options(replicate=2)}, {"name": "frozen parts", **options(replicate=2)}]
    runs.append({**EXPERTS, **options(replicate=2, find_unused_parameters=True)})
    runs.append({**EXPERTS, **options(replicate=2, find_unused_parameters=True, reduce_each_pass=True)})
    expected = [train(str(run["name"]), "sp") for run in runs]

    for rank in run_world(4, sharded_models.train_all, runs=runs, timeout=60):
        for found, wanted in zip(rank, expected, strict=True):
            assert_equal(found, wanted)


@pytest.mark.distributed
def test_buffers_are_those_of_ddp() -> None:
    """They count the passes of a rank, which are fewer than those of one process."""
    runs: list[dict[str, Any]] = [{"name": "buffers"}, {"name": "buffers", "activation_checkpointing": True}]
    expected = run_world(2, sharded_models.train_all, runs=runs, backend="ddp")

    for rank, wanted in zip(run_world(2, sharded_models.train_all, runs=runs), expected, strict=True):
        for one, other in zip(rank, wanted, strict=True):
            assert_equal(one, other)
            assert one["buffers"] == pytest.approx(other["buffers"], rel=0, abs=1e-12)
        assert_equal(rank[1], rank[0])
        assert rank[1]["buffers"] == rank[0]["buffers"]


@pytest.mark.distributed
def test_low_precision_gathers_are_as_accurate_as_autocast() -> None:
    expected = train("tied", "sp", dtype="float32")["losses"]
    scale = {"fsdp-bf16": {}, "fsdp-amp": {"amp": {"init_scale": 256.0}}}

    for backend, layer in scale.items():
        both = [{"fsdp": {"low_precision_gather": True}, **layer}, layer]
        runs = [{"name": "tied", "dtype": "float32", "backend_options": given} for given in both]
        for rank in run_world(2, sharded_models.train_all, runs=runs, backend=backend):
            for found in rank:
                assert found["losses"] == pytest.approx(expected, rel=0, abs=0.03)
                assert found["losses"] != expected
            assert rank[0]["gathered"] == {"fsdp-bf16": "torch.bfloat16", "fsdp-amp": "torch.float16"}[backend]
            assert rank[1]["gathered"] == "torch.float32"
