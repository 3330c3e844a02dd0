"""`trainstack checkpoints lineage | keygen | sign | verify --signature`, as scripts call them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import trainstack as ts
from tests.checkpointing.support import flip_bit
from tests.cli.test_checkpoints import as_json, call
from tests.helpers.modules import Classifier, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a, resumed once, and run b, which began with the weights of a."""
    root = tmp_path_factory.mktemp("runs")
    saving = ts.DefaultCheckpointerArguments(keep_last=1, keep_best=0)
    for epochs in (1, 2):
        train(Classifier(), root / "a", epochs=epochs, checkpointer_args=saving, resume="auto")
    export = root / "a" / "checkpoints" / "checkpoint-model-000000012"
    train(Classifier(), root / "b", epochs=1, checkpointer_args=saving, init_weights_from=export)
    return root


def test_lineage_prints_the_chain_and_names_missing_links(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "lineage", runs / "b" / "checkpoints" / "last")
    own, parent, gone, data, environment = out.splitlines()

    assert (code, err) == (0, "")
    assert own.startswith("checkpoint-000000006: run ")
    export = runs / "a" / "checkpoints" / "checkpoint-model-000000012"
    assert parent.startswith("  <- began with the weights of checkpoint-model-000000012: run ")
    assert parent.endswith(f"[{export}]")
    assert gone.startswith("    <- resumed from checkpoint-000000006: run ")
    assert gone.endswith("[gone]")
    assert data.startswith("data: length 41, samples ")
    assert "processes 1" in environment


def test_json_of_a_lineage_has_kinds_and_states(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "lineage", runs / "b" / "checkpoints" / "checkpoint-model-000000006")

    assert (found["kind"], found["global_step"], found["data"]["length"]) == ("model", 6, 41)
    assert [(one["how"], one["state"]) for one in found["ancestors"]] == [
        ("init_weights_from", "found"),
        ("resume", "gone"),
    ]
    assert all(len(one["manifest"]) == 64 for one in found["ancestors"])


def test_the_lineage_of_new_weights_has_no_parent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ts.export_model({}, tmp_path / "export")

    assert "no parent" in call(capsys, "lineage", path)[1]
    assert call(capsys, "lineage", tmp_path)[0] == 2


def test_lineage_of_a_folder_names_a_checkpoint_in_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "lineage", runs / "b")
    assert (code, out) == (2, "")
    assert f"Name one of those in it, such as {runs / 'b' / 'checkpoints' / 'checkpoint-'}" in err


def test_show_mentions_the_parent(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "show", runs / "b" / "checkpoints" / "last")[1]

    assert "checkpoint-model-000000012, global step 12" in out
    assert "signature" not in out


def test_diff_does_not_compare_lineages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run ends with the bits of an uninterrupted one, and with another lineage."""
    for folder, ends in (("whole", (2,)), ("resumed", (1, 2))):
        torch.manual_seed(0)
        for epochs in ends:
            saving = ts.DefaultCheckpointerArguments()
            train(Classifier(), tmp_path / folder, epochs=epochs, checkpointer_args=saving, resume="auto")
    one, other = (tmp_path / folder / "checkpoints" / "last" for folder in ("whole", "resumed"))

    assert call(capsys, "diff", one, other)[:2] == (0, "all states, plans and versions agree in every bit\n")


class TestSignatures:
    @pytest.fixture
    def signed(self, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
        pytest.importorskip("cryptography", reason="signatures need pip install trainstack[sign]")
        shutil.copytree(runs / "a", tmp_path / "a", symlinks=True)
        code, out, _ = call(capsys, "keygen", tmp_path / "key")
        assert code == 0
        assert "keep it secret" in out
        paths = sorted((tmp_path / "a" / "checkpoints").glob("checkpoint-*0*12"))
        code, out, err = call(capsys, "sign", *paths, "--key", tmp_path / "key")
        assert (code, err) == (0, "")
        assert out.count("global step 12") == len(paths) == 2
        return paths[0]

    def test_verify_by_a_public_key(self, signed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        key = tmp_path / "key.pub"
        code, out, _ = call(capsys, "verify", signed, "--signature", key)
        assert code == 0
        assert "intact, signed as checkpoint-000000012 (run " in out
        assert call(capsys, "verify", signed)[0] == 0
        found = as_json(capsys, "verify", signed, "--signature", key)["checkpoints"][0]
        assert len(found["root"]) == 64

        flip_bit(signed / "state.safetensors", -1)
        code, out, _ = call(capsys, "verify", signed, "--signature", key)
        assert code == 1
        assert "is not as it was signed: state.safetensors has other bytes" in out

    def test_all_in_a_folder_have_to_be_signed(
        self, signed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, _ = call(capsys, "verify", tmp_path / "a", "--signature", tmp_path / "key.pub")
        assert code == 1
        assert out.count("intact, signed as") == 2
        assert "checkpoint-model-000000006 is not signed" in out

    def test_ls_and_show_mention_signatures(
        self, signed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        print_of_key = json.loads((signed / "SIGNATURE.json").read_text())["public_key"]
        head, *rows = call(capsys, "ls", signed.parent)[1].splitlines()
        assert head.split()[-2:] == ["signed", "intact"]
        assert [print_of_key[:16] in row for row in rows] == [False, True, True]
        listed = as_json(capsys, "ls", signed.parent)["checkpoints"]
        assert [one["signed"] for one in listed] == [None, print_of_key, print_of_key]
        assert f"by the key {print_of_key}, not verified" in call(capsys, "show", signed)[1]
        (signed / "SIGNATURE.json").write_text("{")
        assert as_json(capsys, "ls", signed.parent)["checkpoints"][1]["signed"] == "damaged"

    def test_wrong_uses_are_refused(self, signed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert call(capsys, "keygen", tmp_path / "key")[0] == 2
        assert call(capsys, "sign", signed, "--key", tmp_path / "key.pub")[0] == 2
        assert call(capsys, "sign", "memory://b/run", "--key", tmp_path / "key")[0] == 2
        code, _, err = call(capsys, "verify", signed, "--signature", tmp_path / "key")
        assert code == 2
        assert "is a private key, which signs" in err


def test_a_run_signs_every_checkpoint_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints, the export at the end, and files at paths of the user."""
    pytest.importorskip("cryptography", reason="signatures need pip install trainstack[sign]")
    ts.checkpointing.make_key(tmp_path / "key")
    saving = ts.DefaultCheckpointerArguments(sign_key=str(tmp_path / "key"))
    trainer = train(Classifier(), tmp_path / "run", epochs=1, checkpointer_args=saving)
    trainer.export(tmp_path / "export")
    trainer.save_checkpoint(path=tmp_path / "extra")

    for path in (tmp_path / "run", tmp_path / "export", tmp_path / "extra"):
        code, out, _ = call(capsys, "verify", path, "--signature", tmp_path / "key.pub")
        assert (code, "signed as" in out) == (0, True)
