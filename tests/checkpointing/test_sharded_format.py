"""Checkpoints with tensors in files of several ranks: the same content and the same root for any division."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpointing.sharded_support import write_sharded
from tests.checkpointing.support import flip_bit, make_checkpoint, raw, same
from trainstack._deferred import DeferredTensor
from trainstack.checkpointing import Checkpoint, checksums, index, read_checkpoint, verify_checkpoint, write_checkpoint
from trainstack.checkpointing.directory import read_manifest
from trainstack.checkpointing.reading import read_deferred, read_model, read_states
from trainstack.checkpointing.sharded import row_grid
from trainstack.checkpointing.sharded.row_grid import ChunkShare, RowGrid
from trainstack.checkpointing.sharded.stored_tensors import open_tensors
from trainstack.errors import CheckpointDamagedError
from trainstack.trainer.core.shards import gather_shards

KINDS = {
    "wide": torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0)),
    "vector": torch.arange(11, dtype=torch.float64),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "half": torch.randn(6, 2, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "complex": torch.complex(torch.arange(5.0, dtype=torch.float64), torch.ones(5, dtype=torch.float64)),
    "flipped": torch.arange(12.0).reshape(3, 4).t(),
}


def checkpoint_of(**tensors: torch.Tensor) -> Checkpoint:
    made = make_checkpoint(3, step=3)
    made.module_interface_state = {"encoder.weight": torch.full((3, 2), 3.0), **tensors}
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_sharded_checkpoint_reads_as_one_of_one_process(tmp_path: Path, size: int) -> None:
    checkpoint = checkpoint_of(**KINDS)
    checkpoint.rank_states = [{"noise": torch.ones(3)}, {"noise": torch.zeros(3)}]

    path = write_sharded(checkpoint, tmp_path, "checkpoint-1", size)
    whole = write_checkpoint(checkpoint, tmp_path, "checkpoint-2")

    verify_checkpoint(path)
    assert [read_manifest(one).format_version for one in (path, whole)] == [3, 2]
    assert same(vars(read_checkpoint(path)), vars(read_checkpoint(whole)))
    assert same(read_model(path), read_model(whole))
    shapes = [
        {name: one.shape for name, one in read_states(p, tensors=False)[1]["module_interface_state"].items()}
        for p in (path, whole)
    ]
    assert shapes[0] == shapes[1]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths at which small tensors have many leaves and chunks."""
    monkeypatch.setattr(row_grid, "LEAF_BYTES", 16)
    monkeypatch.setattr(row_grid, "WIDE_BYTES", 32)
    monkeypatch.setattr(row_grid, "CHUNK_BYTES", 64)
    monkeypatch.setattr(index, "CHUNK_BYTES", 64)


def cuts_of(borders: Sequence[int], rows: int) -> list[int]:
    return sorted(min(rows, border) for border in borders)


@pytest.mark.usefixtures("small_chunks")
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    row=st.integers(1, 50),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    borders=st.lists(st.integers(0, 40), min_size=0, max_size=4),
    asked=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_any_division_has_one_root_and_gives_any_rows(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    row: int,
    dtype: torch.dtype,
    borders: list[int],
    asked: tuple[int, int],
) -> None:
    tensor = torch.randint(0, 255, (rows, row), generator=torch.Generator().manual_seed(rows * row)).to(dtype)
    checkpoint, folder = Checkpoint(module_interface_state={"w": tensor}), tmp_path_factory.mktemp("any")

    one = write_sharded(checkpoint, folder, "one", 1)
    cut = write_sharded(checkpoint, folder, "cut", len(borders) + 1, lambda name, one: cuts_of(borders, len(one)))

    verify_checkpoint(cut)
    assert read_manifest(cut).root == read_manifest(one).root
    stored, (begin, end) = open_tensors(cut), sorted(min(rows, place) for place in asked)
    assert raw(stored["w"]) == raw(tensor)
    assert raw(stored.rows("w", begin, end)) == raw(tensor[begin:end])


def test_other_bits_have_another_root(tmp_path: Path) -> None:
    tensor = torch.randn(9, 1000)
    other = tensor.clone()
    other[4, 7] += 1
    roots = {
        read_manifest(write_sharded(checkpoint_of(w=one), tmp_path, f"c-{i}", 2)).root
        for i, one in enumerate((tensor, other))
    }

    assert len(roots) == 2


def test_the_lengths_of_leaves_and_chunks_are_fixed() -> None:
    """They are a part of the format: with others, equal states would have other roots."""
    assert (row_grid.LEAF_BYTES, row_grid.WIDE_BYTES, checksums.CHUNK_BYTES) == (4096, 65536, 4 << 20)
    narrow, matrix, long = RowGrid.of([10_000], 4), RowGrid.of([4096, 3000], 4), RowGrid.of([3, 5 << 20], 1)
    assert list(narrow.chunks(0, 40_000)) == [(0, 40_000)]
    assert next(matrix.chunks(0, matrix.size)) == (0, (4 << 20) // 12_000 * 12_000)
    assert list(long.chunks(0, 6 << 20)) == [(0, 4 << 20), (4 << 20, 5 << 20), (5 << 20, 6 << 20)]
    data = bytes(range(256)) * 200
    assert narrow.digest(data[:40_000], 0) == "e6249ef0ef64b0ca04860c861e0a12da"


@pytest.mark.usefixtures("small_chunks")
def test_shares_of_a_chunk_join_in_any_pieces() -> None:
    draw = random.Random(0)
    for row in (1, 3, 5, 12, 20, 33, 70, 130):
        grid, data = RowGrid.of([9, row], 1), draw.randbytes(9 * row)
        for start, end in grid.chunks(0, grid.size):
            for _ in range(20):
                cuts = sorted({start, end, *(draw.randrange(start, end) for _ in range(3))})
                shares = [grid.share(data[a:b], a) for a, b in pairwise(cuts)]
                again = [ChunkShare.from_json(json.loads(json.dumps(share.to_json()))) for share in shares]
                assert grid.join((start, end), again) == grid.digest(data[start:end], start)


def test_rows_are_read_without_the_others(tmp_path: Path) -> None:
    """A damaged file affects only reads of its rows."""
    tensor = torch.arange(30_000.0).reshape(30, 1000)
    path = write_sharded(checkpoint_of(w=tensor), tmp_path, "checkpoint-1", 3)
    damaged = path / "model.rank-00002-of-00003.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)

    stored = open_tensors(path)
    assert torch.equal(stored.rows("w", 0, 10), tensor[:10])
    assert torch.equal(stored.rows("w", 20, 30), tensor[20:])
    with pytest.raises(CheckpointDamagedError, match=r"model\.rank-00002-of-00003"):
        stored.rows("w", 9, 11)
    with pytest.raises(ValueError, match="no rows 5 to 31"):
        stored.rows("w", 5, 31)


def test_rows_are_read_from_whole_files_too(tmp_path: Path) -> None:
    path = write_checkpoint(checkpoint_of(**KINDS), tmp_path, "checkpoint-1")
    stored = open_tensors(path)
    assert torch.equal(stored.rows("wide", 2, 5), KINDS["wide"][2:5])
    assert torch.equal(stored["scalar"], KINDS["scalar"])
    assert stored.shape("empty") == [0, 4]


def test_tensors_of_several_files_are_deferred_and_read_by_rows(tmp_path: Path) -> None:
    """A resume reads the rows of a rank alone: rows that another rank has may be damaged by then."""
    large = torch.randn(4096, 100, generator=torch.Generator().manual_seed(0))
    path = write_sharded(checkpoint_of(large=large, complex=KINDS["complex"]), tmp_path, "checkpoint-1", 2)

    states = [read_deferred(path, verified=verified).module_interface_state for verified in (False, True)]
    for state in states:
        assert state is not None
        assert isinstance(state["large"], DeferredTensor)
        assert torch.equal(state["large"].whole(), large)
        assert torch.equal(state["large"].rows(2040, 2056), large[2040:2056])
        assert torch.equal(state["complex"], KINDS["complex"])

    flip_bit(path / "model.rank-00002-of-00002.safetensors", large.nbytes // 4, 3)
    assert torch.equal(states[0]["large"].rows(0, 1000), large[:1000])
    with pytest.raises(CheckpointDamagedError, match=r"model\.rank-00002-of-00002"):
        states[0]["large"].whole()
    with pytest.raises(CheckpointDamagedError, match=r"model\.rank-00002-of-00002"):
        read_deferred(path)


def test_values_that_are_not_sharded_are_kept_while_shards_are_gathered() -> None:
    state = {"weights": [torch.ones(2), 1], "name": "x"}
    assert gather_shards(state, keep=False) == state
