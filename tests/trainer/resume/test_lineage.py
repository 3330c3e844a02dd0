"""Each checkpoint and export names its ancestors, over resumes, runs, exports and kinds of files."""

from __future__ import annotations

import hashlib
import json
import pickle
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, InMemory, numbers, train
from tests.helpers.private_runs import private
from trainstack.backends import Communicator, World
from trainstack.checkpointing import list_checkpoints, read_lineage
from trainstack.checkpointing.directory import read_manifest
from trainstack.checkpointing.integrity.lineage import MAX_ANCESTORS, Ancestor, Lineage, digest_of, trace
from trainstack.checkpointing.manifest import decode_plain
from trainstack.cli.main import main
from trainstack.errors import CheckpointDamagedError
from trainstack.trainer.resume.lineage import _environment


def saving(**changes: Any) -> ts.DefaultCheckpointerArguments:
    return ts.DefaultCheckpointerArguments(**{"keep_last": None, **changes})


def newest(directory: Path, kind: str = "checkpoint") -> Path:
    return [info.path for info in list_checkpoints(directory / "checkpoints") if info.kind == kind][-1]


def sha256(path: Path) -> str:
    return hashlib.sha256((path / "MANIFEST.json").read_bytes()).hexdigest()


def test_a_new_run_has_data_and_environment_but_no_parent(tmp_path: Path) -> None:
    train(Classifier(), tmp_path, epochs=1, checkpointer_args=saving())

    for kind in ("checkpoint", "model"):
        found = read_lineage(newest(tmp_path, kind))
        assert (found.parent, found.omitted, found.privacy_statement) == (None, 0, None)
        assert found.data is not None
        assert found.data["length"] == 41
        assert len(found.data["samples"]) == 16
        assert found.environment["processes"] == "1"
        assert found.environment["device"].startswith("cpu ")


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_the_environment_names_the_gpu_and_its_libraries(cuda: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)  # None in a build for ROCm
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    found = _environment(World(rank=0, size=2, local_rank=0, device=torch.device("cuda:1"), comm=Communicator()))

    libraries = {} if cuda is None else {"cuda": "13.0", "cudnn": "91002"}
    machine = {"system": platform.system(), "machine": platform.machine(), "processes": "2"}
    assert found == {**machine, "device": "cuda" if cuda is None else "GPU 1", **libraries}


def test_other_data_has_another_digest(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        train(Classifier(numbers(20, seed=seed)), tmp_path / name, epochs=1, checkpointer_args=saving())
    one, same, other = (read_lineage(newest(tmp_path / name)).data for name in ("one", "same", "other"))

    assert one == same
    assert one != other


def test_the_chain_includes_resumes_warm_starts_and_exports(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train(Classifier(), first, epochs=1, checkpointer_args=saving())
    parent = newest(first)
    train(Classifier(), first, epochs=2, checkpointer_args=saving(), resume="auto")
    export = newest(first, "model")
    train(Classifier(), second, epochs=1, checkpointer_args=saving(), init_weights_from=export)
    assert main(["checkpoints", "export", str(newest(second)), str(tmp_path / "out")]) == 0

    chain = read_lineage(tmp_path / "out").ancestors
    run = read_manifest(parent).run_id
    assert [one.how for one in chain] == ["export", "init_weights_from", "resume"]
    assert [one.kind for one in chain] == ["checkpoint", "model", "checkpoint"]
    assert [one.name for one in chain] == [newest(second).name, export.name, parent.name]
    assert [one.manifest for one in chain] == [sha256(newest(second)), sha256(export), sha256(parent)]
    assert [(one.run_id == run, one.global_step) for one in chain] == [(False, 6), (True, 12), (True, 6)]
    assert [one.root for one in chain] == [read_manifest(path).root for path in (newest(second), export, parent)]
    assert read_lineage(tmp_path / "out").data == read_lineage(newest(second)).data
    readme = (tmp_path / "out" / "README.md").read_text()
    assert (
        f"| parent | export {newest(second).name}, global step 6, SHA-256 of its manifest {chain[0].manifest} |"
        in readme
    )


def test_deleted_and_replaced_ancestors_are_recognized(tmp_path: Path) -> None:
    for epochs in (1, 2, 3):
        train(Classifier(), tmp_path, epochs=epochs, checkpointer_args=saving(), resume="auto")
    path = newest(tmp_path)
    links = trace(path)
    assert [(link.path and link.path.name, link.replaced) for link in links] == [
        ("checkpoint-000000012", None),
        ("checkpoint-000000006", None),
    ]

    shutil.rmtree(links[1].path or "")
    moved = tmp_path / "elsewhere" / "runs" / "a" / "checkpoints"
    moved.mkdir(parents=True)
    shutil.move(links[0].path or "", moved / "renamed")
    assert [link.path for link in trace(path)] == [None, None]
    assert [link.path for link in trace(path, [tmp_path / "elsewhere" / "runs"])] == [moved / "renamed", None]

    shutil.copytree(path, path.with_name("checkpoint-000000006"))
    manifest = path.with_name("checkpoint-000000006") / "MANIFEST.json"
    _rename(manifest, "checkpoint-000000006")
    assert trace(path)[1].replaced == manifest.parent


def _rename(path: Path, name: str) -> None:
    """Write the manifest at `path` again, under another name and with the right hash."""
    import dataclasses

    from trainstack.checkpointing import manifest

    path.write_bytes(manifest.render(dataclasses.replace(manifest.read(path), name=name)))


@pytest.mark.parametrize("mode", ["weights", "weights_and_optimizer"])
def test_the_lineage_of_a_partial_resume_names_its_mode(tmp_path: Path, mode: Any) -> None:
    train(Classifier(), tmp_path / "a", epochs=1, checkpointer_args=saving())
    source = newest(tmp_path / "a")
    train(Classifier(), tmp_path / "b", epochs=1, checkpointer_args=saving(), resume=source, resume_mode=mode)

    parent = read_lineage(newest(tmp_path / "b")).parent
    assert parent is not None
    assert (parent.how, parent.manifest) == (f"resume_{mode}", sha256(source))


def test_an_evaluation_before_training_does_not_lose_the_parent(tmp_path: Path) -> None:
    train(Classifier(), tmp_path / "a", epochs=1, checkpointer_args=saving())
    source = newest(tmp_path / "a", "model")
    trainer = ts.Trainer(
        Classifier(validate=True),
        ts.TrainerArguments(
            output_dir=str(tmp_path / "b"), epochs=1, train_batch_size=8, init_weights_from=source, progress="none"
        ),
    )
    trainer.validate()
    trainer.train()

    parent = read_lineage(newest(tmp_path / "b")).parent
    assert parent is not None
    assert parent.manifest == sha256(source)


def test_a_pickled_trainer_exports_with_the_lineage_of_its_run(tmp_path: Path) -> None:
    train(Classifier(), tmp_path / "run", epochs=1, checkpointer_args=saving())
    source = newest(tmp_path / "run")
    trainer = train(Classifier(), tmp_path / "run", epochs=2, checkpointer_args=saving(), resume="auto")
    pickle.loads(pickle.dumps(trainer)).export(tmp_path / "export")

    parent = read_lineage(tmp_path / "export").parent
    assert parent is not None
    assert parent.manifest == sha256(source)


def test_weights_without_a_manifest_have_only_a_name(tmp_path: Path) -> None:
    ts.export_model(Classifier(), tmp_path / "export")
    shutil.copy(tmp_path / "export" / "model.safetensors", tmp_path / "weights.safetensors")
    train(
        Classifier(),
        tmp_path / "run",
        epochs=1,
        checkpointer_args=saving(),
        init_weights_from=tmp_path / "weights.safetensors",
    )

    found = read_lineage(newest(tmp_path / "run")).ancestors
    assert found == (Ancestor(how="init_weights_from", name="weights.safetensors"),)


def test_the_lineage_of_a_private_run_is_independent_of_records(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    train_private(tmp_path, 1)
    train_private(tmp_path, 2)
    export = newest(tmp_path, "model")
    assert main(["checkpoints", "export", str(newest(tmp_path)), str(tmp_path / "out")]) == 0

    for path in (newest(tmp_path), export, tmp_path / "out"):
        found = read_lineage(path)
        assert found.data is None
        assert found.ancestors
        assert all(one.manifest is None and one.root is None for one in found.ancestors)
        told = (decode_plain(read_manifest(path).metadata) or {})["privacy"]
        assert found.privacy_statement == digest_of(told)
    assert [link.path for link in trace(export)] == [tmp_path / "checkpoints" / "checkpoint-000000006"]


def train_private(directory: Path, epochs: int) -> None:
    args = private(directory, epochs=epochs, resume="auto", checkpointer_args=saving())
    ts.Trainer(Classifier(), args).train()


def test_a_custom_checkpointer_receives_and_continues_the_lineage(tmp_path: Path) -> None:
    checkpointer = InMemory()
    for epochs in (1, 2):
        args = ts.TrainerArguments(
            output_dir=str(tmp_path), epochs=epochs, train_batch_size=8, resume="auto", progress="none"
        )
        ts.Trainer(Classifier(), args, checkpointer=checkpointer).train()

    first, last = checkpointer.kept[0], checkpointer.kept[-1]
    assert first.lineage is not None
    assert first.lineage["ancestors"] == []
    chain = Lineage.from_json(last.lineage).ancestors
    assert [(one.how, one.global_step, one.manifest) for one in chain] == [("resume", 6, None)]


def test_a_long_chain_is_cut_and_omissions_counted() -> None:
    chain = tuple(Ancestor(how="resume", name=f"c-{n}") for n in range(MAX_ANCESTORS + 7))
    found = Lineage.from_json(json.loads(json.dumps(Lineage(ancestors=chain, omitted=2).to_json())))

    assert found.ancestors == chain[:MAX_ANCESTORS]
    assert found.omitted == 9


@pytest.mark.parametrize(
    "change",
    [
        {"ancestors": [{"how": "theft", "name": "a"}]},
        {"ancestors": 3},
        {"omitted": -1},
        {"environment": {"device": 1}},
        {"data": {"length": [1]}},
        {"privacy_statement": 0},
    ],
)
def test_a_forged_lineage_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointDamagedError, match="the lineage in a manifest cannot be read"):
        Lineage.from_json({**Lineage().to_json(), **change})


def test_a_model_without_manifest_field_has_an_empty_lineage(tmp_path: Path) -> None:
    path = ts.export_model(nn.Linear(2, 1), tmp_path / "export")

    assert read_lineage(path) == Lineage()
