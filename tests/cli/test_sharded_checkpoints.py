"""`trainstack checkpoints` with sharded checkpoints; exports in several files and in torch's distributed format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trainstack as ts
from tests.checkpointing.sharded_support import write_sharded
from tests.checkpointing.support import flip_bit, make_checkpoint, same
from tests.checkpointing.test_exporting import load_by_the_readme
from tests.cli.test_checkpoints import as_json, call
from trainstack.checkpointing import read_model, verify_checkpoint, write_checkpoint
from trainstack.checkpointing.weights import load_torch_weights, read_weights
from trainstack.errors import CheckpointMismatchError, CheckpointNotFoundError, ConfigurationError


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    write_checkpoint(make_checkpoint(1, step=1), folder, "checkpoint-000000001")
    return write_sharded(make_checkpoint(2, step=2), folder, "checkpoint-000000002", 3)


def test_ls_show_verify_and_scrub_read_both_formats(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = as_json(capsys, "ls", sharded.parent, "--verify")["checkpoints"]
    assert [(one["name"], one["problem"]) for one in listed] == [
        ("checkpoint-000000001", None),
        ("checkpoint-000000002", None),
    ]
    shown = as_json(capsys, "show", sharded)
    assert shown["states"]["module_interface_state"]["encoder.weight"] == {"dtype": "float32", "shape": [3, 2]}
    assert "model.rank-00003-of-00003.safetensors" in shown["files"]

    flip_bit(sharded / "state.rank-00002-of-00003.safetensors", -1)
    for action in ("verify", "scrub"):
        code, out, _ = call(capsys, action, sharded.parent)
        assert code == 1
        assert "checkpoint-000000001: intact" in out
        assert "state.rank-00002-of-00003.safetensors is damaged" in out


def test_diff_compares_a_sharded_checkpoint_with_whole_files(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal bits are equal in any number of files."""
    equal = write_checkpoint(ts.read_checkpoint(sharded), tmp_path, "equal")
    assert call(capsys, "diff", sharded, equal)[0] == 0
    code, out, _ = call(capsys, "diff", sharded, sharded.with_name("checkpoint-000000001"), "--model")
    assert code == 1
    assert "encoder.weight']: 6 elements differ, by at most 1" in out


@pytest.mark.parametrize("limit", ["1B", "30B", "1KB", None])
def test_export_divides_into_files_for_readers_of_safetensors(
    sharded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    limit: str | None,
) -> None:
    size = [] if limit is None else ["--max-shard-size", limit]
    code, out, err = call(capsys, "export", sharded, tmp_path / "export", *size)
    assert (code, out, err) == (0, f"{tmp_path / 'export'}\n", "")

    expected = make_checkpoint(2).module_interface_state
    verify_checkpoint(tmp_path / "export")
    assert same(dict(read_model(tmp_path / "export")), dict(expected or {}))
    files = sorted(path.name for path in (tmp_path / "export").glob("model*.safetensors"))
    assert len(files) == {"1B": 2, "30B": 2, "1KB": 1, None: 1}[limit]
    if len(files) == 1:
        return
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    places = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert places["metadata"]["total_size"] == 32
    for name, file in places["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "export" / file)[name], (expected or {})[name])
    model = nn.ModuleDict({"encoder": nn.Linear(2, 3)})
    model["encoder"].bias = nn.Parameter(torch.zeros(2))
    load_by_the_readme(tmp_path / "export", model, monkeypatch)
    assert model["encoder"].weight.detach()[0, 0] == 2.0


def test_damage_to_one_file_of_an_export_is_named(sharded: Path, tmp_path: Path, capsys: Any) -> None:
    call(capsys, "export", sharded, tmp_path / "export", "--max-shard-size", "30B")
    for file in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        flip_bit(tmp_path / "export" / file, -3)
        assert file in call(capsys, "verify", tmp_path / "export")[1]
        flip_bit(tmp_path / "export" / file, -3)


@pytest.mark.parametrize("size", ["0B", "many", "5", "-1GB", "GB"])
def test_an_invalid_size_is_refused(sharded: Path, tmp_path: Path, capsys: Any, size: str) -> None:
    code, _, err = call(capsys, "export", sharded, tmp_path / "export", f"--max-shard-size={size}")
    assert (code, "it is not a size" in err, "or a text such as '100B', '5GB'" in err) == (2, True, True)
    assert not (tmp_path / "export").exists()


@pytest.mark.long
def test_from_pretrained_reads_an_export_in_several_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)  # its output layer is tied to the embeddings
    ts.export_model(model, tmp_path / "export", part="", max_shard_size="20KB")

    assert len(list((tmp_path / "export").glob("model-*.safetensors"))) > 1
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "export")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_writes_files_that_torch_reads_and_this_library_refuses(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = tmp_path / "dcp"
    assert call(capsys, "export", sharded, target, "--dcp")[0] == 0
    expected = dict(make_checkpoint(2).module_interface_state or {})
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=target, no_dist=True)
    assert same(found, expected)

    code, _, err = call(capsys, "export", sharded, target, "--dcp")
    assert (code, "exists, and is not replaced" in err) == (2, True)
    with pytest.raises(CheckpointNotFoundError, match=r"metadata is a pickle.*format_utils dcp_to_torch"):
        read_weights(target)
    dcp_to_torch_save(target, tmp_path / "weights.pt")
    assert same(load_torch_weights(tmp_path / "weights.pt"), expected)


def test_the_rows_of_one_rank_are_refused_as_weights(sharded: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"has the rows of one rank.*Name its folder"):
        read_weights(sharded / "model.rank-00001-of-00003.safetensors")
    assert same(read_weights(sharded), dict(make_checkpoint(2).module_interface_state or {}))


def test_export_model_refuses_a_wrong_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_shard_size=True: it is not a size"):
        ts.export_model(nn.Linear(2, 2), tmp_path / "export", max_shard_size=True)
