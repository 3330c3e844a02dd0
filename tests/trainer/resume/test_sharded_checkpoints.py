"""Runs whose ranks write their own rows: resumed on other ranks, and all or nothing when a rank fails."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import run_world
from tests.helpers.workers import sharded, sharded_mixed
from trainstack.checkpointing import list_checkpoints, make_key, read_lineage, verify_checkpoint, verify_signature
from trainstack.checkpointing.directory import read_manifest

pytestmark = pytest.mark.distributed


def checkpoints(directory: Path) -> list[Path]:
    return [info.path for info in list_checkpoints(directory / "checkpoints") if info.kind == "checkpoint"]


@pytest.mark.parametrize("async_save", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_run_continues_under_another_backend_and_number_of_ranks(tmp_path: Path, async_save: bool) -> None:
    """fsdp x 3 -> fsdp x 2 -> sp -> ddp x 2 -> fsdp x 3; only sharded states are written by all ranks."""
    whole = sharded.resumed(str(tmp_path / "whole"), "sp", 24)

    key = str(tmp_path / "key") if find_spec("cryptography") else None
    if key is not None:
        make_key(key)
    ranks: list[dict[str, Any]] = []
    versions = []
    for backend, size, steps in (("fsdp", 3, 5), ("fsdp", 2, 9), ("sp", 1, 13), ("ddp", 2, 17), ("fsdp", 3, 24)):
        options = {"directory": str(tmp_path / "run"), "backend": backend, "max_steps": steps}
        options |= {"sharded": True, "async_save": async_save, "sign_key": key}
        ranks = [sharded.resumed(**options)] if backend == "sp" else run_world(size, sharded.resumed, **options)
        newest = checkpoints(tmp_path / "run")[-1]
        verify_checkpoint(newest)
        if key is not None:
            verify_signature(newest, f"{key}.pub")
        versions.append((read_manifest(newest).format_version, len(list(newest.glob("model*.safetensors")))))

    assert versions == [(3, 3), (3, 2), (2, 1), (2, 1), (3, 3)]
    chain = read_lineage(checkpoints(tmp_path / "run")[-1])
    assert [(one.how, one.global_step) for one in chain.ancestors] == [("resume", step) for step in (17, 13, 9, 5)]
    assert (chain.environment["processes"], len({one.run_id for one in chain.ancestors})) == ("3", 1)
    for rank in ranks:
        assert rank["weights"] == pytest.approx(whole["weights"], rel=0, abs=1e-10)
        assert rank["losses"][-1] == pytest.approx(whole["losses"][-1], rel=0, abs=1e-10)
    leftovers = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".tmp-")]
    assert not leftovers


def test_a_resume_on_the_same_ranks_has_the_same_bits(tmp_path: Path) -> None:
    """The roots are also those of a run that saves in the background."""
    run_world(2, sharded.resumed, directory=str(tmp_path / "one"), backend="fsdp", max_steps=12, sharded=True)
    for steps in (4, 12):
        options = {"sharded": True, "async_save": True}
        run_world(2, sharded.resumed, directory=str(tmp_path / "two"), backend="fsdp", max_steps=steps, **options)

    one, two = (read_manifest(checkpoints(tmp_path / name)[-1]) for name in ("one", "two"))
    assert (one.global_step, two.global_step) == (12, 12)
    assert model_chunks(tmp_path / "one") == model_chunks(tmp_path / "two")


@pytest.mark.parametrize("files", [True, pytest.param(False, marks=pytest.mark.long)])
def test_replicas_are_saved_once_and_resumed_without_replicas(tmp_path: Path, files: bool) -> None:
    """Two replicas on two ranks each -> two replicas of one rank -> one process."""
    whole = sharded.resumed(str(tmp_path / "whole"), "sp", 12, batch=12)

    for size, steps in ((4, 4), (2, 8)):
        options = {"directory": str(tmp_path / "run"), "max_steps": steps, "sharded": files, "batch": 12}
        run_world(size, sharded.resumed, backend="fsdp", replicate=2, timeout=60, **options)
        verify_checkpoint(checkpoints(tmp_path / "run")[-1])
    last = sharded.resumed(str(tmp_path / "run"), "sp", 12, batch=12)

    assert last["weights"] == pytest.approx(whole["weights"], rel=0, abs=1e-10)
    assert last["losses"] == pytest.approx(whole["losses"], rel=0, abs=1e-10)


def model_chunks(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(checkpoints(directory)[-1].glob("model.*.safetensors"))]


@pytest.mark.parametrize("async_save", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("kind", "words"),
    [("full", "rank 1: OSError: .*No space left"), ("hidden", "rank 1 does not see .*one file system that all ranks")],
)
def test_a_failed_write_commits_nothing_and_raises_on_all(
    tmp_path: Path, kind: str, words: str, async_save: bool
) -> None:
    raised = run_world(3, sharded.failing, directory=str(tmp_path), kind=kind, async_save=async_save)

    assert all(re.search(words, text) for text in raised), raised
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000000003"]
    verify_checkpoint(checkpoints(tmp_path)[0])
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def test_ranks_with_other_states_are_refused(tmp_path: Path) -> None:
    raised = run_world(2, sharded.unequal_states, directory=str(tmp_path))

    assert all("the ranks do not have the same state" in text and "'other'" in text for text in raised), raised
    assert not checkpoints(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("async_save", [False, True])
def test_if_one_rank_is_killed_the_others_end_and_the_run_continues(tmp_path: Path, async_save: bool) -> None:
    """The next start removes the files of the killed rank."""
    options: dict[str, Any] = {"directory": str(tmp_path), "async_save": async_save}
    ended = run_world(3, sharded.failing, kind="killed", timeout=60, fresh=True, may_fail=True, **options)

    assert ended[1]["exit"] != 0
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000000003"]
    run_world(2, sharded.resumed, backend="fsdp", max_steps=9, sharded=True, **options)
    assert checkpoints(tmp_path)[-1].name == "checkpoint-000000009"
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


@pytest.mark.long
@pytest.mark.parametrize("seed", [2441, *range(100, 120)])
def test_mixed_models_and_options_continue_under_other_backends_and_ranks(seed: int, tmp_path: Path) -> None:
    chain = [("fsdp", 3, 1), ("fsdp", 2, 3), ("sp", 1, 4), ("ddp", 2, 6), ("fsdp", 3, 7)]
    for backend, size, steps in chain:
        given: dict[str, Any] = {"seed": seed, "max_steps": steps}
        expected = sharded_mixed.resumed(backend="sp", directory=str(tmp_path / "sp"), **given)
        given |= {"backend": backend, "directory": str(tmp_path / "chain")}
        ranks = (
            run_world(size, sharded_mixed.resumed, timeout=60, **given)
            if size > 1
            else [sharded_mixed.resumed(**given)]
        )
        assert ranks == ranks[:1] * size
        for name, values in expected.items():
            assert ranks[0][name] == pytest.approx(values, rel=0, abs=1e-10), (name, backend, size, steps)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 210))
def test_mixed_models_and_options_continue_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    given = {"seed": seed, "backend": "fsdp", "replicate": 1 + seed % 2}
    for steps in (2, 5, 7):
        broken = run_world(
            2, sharded_mixed.resumed, directory=str(tmp_path / "broken"), max_steps=steps, timeout=60, **given
        )
    whole = run_world(2, sharded_mixed.resumed, directory=str(tmp_path / "whole"), max_steps=7, timeout=60, **given)
    for name in ("weights", "states", "averages"):
        assert broken[0][name] == whole[0][name], name
