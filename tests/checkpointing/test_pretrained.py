"""Weights from folders of `save_pretrained`, sharded files and the cache of the Hub, and exports that they read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

import trainstack as ts
from tests.checkpointing.test_exporting import load_by_the_readme
from tests.checkpointing.test_warm_start import Net
from trainstack.checkpointing.pretrained import reading
from trainstack.checkpointing.pretrained.matching import match_weights
from trainstack.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
)


class Wrapped(nn.Module):
    """A network under a name, as in `SupervisedModule`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"net": Net()})
        self.scale = nn.Parameter(torch.ones(1))


class CountedName(str):
    """A name that counts its comparisons with other names."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def write_shards(folder: Path, model: nn.Module) -> Path:
    folder.mkdir()
    places = {}
    for number, name in enumerate(model.state_dict()):
        places[name] = f"model-{number % 2 + 1:05d}-of-00002.safetensors"
    for file in set(places.values()):
        save_file({n: t for n, t in model.state_dict().items() if places[n] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def test_folders_files_and_shards_fill_the_only_matching_part(tmp_path: Path) -> None:
    source = Net()
    (tmp_path / "whole").mkdir()
    save_file(source.state_dict(), tmp_path / "whole" / "model.safetensors")
    index = write_shards(tmp_path / "shards", source)
    for path in (tmp_path / "whole", tmp_path / "whole" / "model.safetensors", index.parent, index):
        model = Wrapped()
        report = ts.warm_start(model, path)

        assert (report.part, report.missing, report.unexpected) == ("model.net", ("scale",), ())
        assert report.loaded[0] == "model.net.body.weight"
        assert f"loaded 4 tensors from {path} into 'model.net'; 1 missing" in str(report)
        assert torch.equal(model.model["net"].head.weight, source.head.weight)


def test_a_tied_tensor_is_loaded_under_all_its_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.out.weight = self.into.weight

    model = Tied()
    report = ts.warm_start(model, {"into.weight": torch.full((5, 3), 2.0)}, strict=True)

    assert report.loaded == ("into.weight", "out.weight")
    assert model.out.weight[0, 0] == 2


def test_the_hub_cache_is_read_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--me--net"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "blobs").mkdir()
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError, match=r"snapshot_download\('me/net'\)\. The local cache .* without"):
        ts.warm_start(Net(), "me/net")
    source = Net()
    save_file(source.state_dict(), repo / "blobs" / "1234")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    model = Net()

    assert ts.warm_start(model, "me/net", strict=True).source == "me/net"
    assert torch.equal(model.head.weight, source.head.weight)
    with pytest.raises(CheckpointNotFoundError, match=r"snapshot_download\('me/net', revision='v2'\)\. It is not in"):
        ts.warm_start(Net(), "me/net@v2")


def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "pytorch_model.bin"):
        torch.save(Net().state_dict(), tmp_path / name)
    with pytest.raises(CheckpointMismatchError, match=r"pytorch_model\.bin is a pickle.*export_model\(load_torch"):
        ts.warm_start(Net(), tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../secret.safetensors"}}, "is not the name of a .safetensors file in its folder"),
        ({"weight_map": {"a": "model.bin"}}, "is not the name of a .safetensors file in its folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which is not in its folder"),
        ({"weight_map": {"a": "one.safetensors"}}, "says that one.safetensors has 'a', which is not so"),
        ([], "is not an index of safetensors files"),
    ],
)
def test_an_index_is_data_that_is_checked(index: object, message: str, tmp_path: Path) -> None:
    save_file({"b": torch.ones(1)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointDamagedError, match=message):
        ts.warm_start(Net(), tmp_path)


def test_several_files_of_weights_are_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"b": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"several files of weights: one\.safetensors, two\.safetensors"):
        ts.warm_start(Net(), tmp_path)


def front_matter(folder: Path) -> dict[str, object]:
    _, text, _ = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(text)


class TestExport:
    def test_from_pretrained_reads_the_part_of_a_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        data = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 4
        model = transformers.GPT2LMHeadModel(config)
        args = ts.TrainerArguments(epochs=1, writers=[], progress="none", output_dir=tmp_path / "run")
        trainer = ts.Trainer(ts.SupervisedModule(model, None, "adamw", data), args)
        trainer.train()
        trainer.export(tmp_path / "gpt", part="model", card={"license": "mit"})
        ids = torch.tensor([[1, 2, 3]])
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt").eval()

        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert front_matter(tmp_path / "gpt") == {
            "library_name": "transformers",
            "tags": ["trainstack"],
            "license": "mit",
        }
        load_by_the_readme(tmp_path / "gpt", model, monkeypatch)
        assert ts.read_model(tmp_path / "gpt").keys() == model.state_dict().keys()

    def test_only_the_adapter_of_a_peft_model_is_exported(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        base = Net()
        adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["body"], r=2, init_lora_weights=False))
        export = ts.export_model(adapted, tmp_path / "adapter")
        torch.manual_seed(0)
        loaded = peft.PeftModel.from_pretrained(Net(), export)

        assert len(ts.read_model(export)) == 2
        assert front_matter(export)["library_name"] == "peft"
        for name, tensor in adapted.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)

    def test_the_readme_of_a_whole_module_names_the_prefix(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = ts.SupervisedModule(Net(), nn.MSELoss(), "sgd", [(torch.ones(4), torch.ones(3))])
        text = (ts.export_model(module, tmp_path / "whole") / "README.md").read_text()
        network = Net()
        monkeypatch.chdir(tmp_path / "whole")
        blocks = re.findall(r"```python\n(.*?)```", text, re.S)
        exec(blocks[0] + blocks[1], {"model": module, "network": network})

        assert "All names begin with `model.`" in text
        assert torch.equal(network.head.weight, module.model.head.weight)

    def test_an_unknown_part_is_answered_with_the_existing_ones(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"part='modle'.*Its parts are 'body', 'head'"):
            ts.export_model(Net(), tmp_path / "export", part="modle")

    def test_companions_of_other_libraries_come_without_pickles_and_second_copies(self, tmp_path: Path) -> None:
        class Mixed(Net):
            def save_pretrained(self, folder: str) -> None:
                for name in ("config.json", "model.safetensors", "README.md", "training_args.bin"):
                    Path(folder, name).write_text("{}")

        export = ts.export_model(Mixed(), tmp_path / "export")

        assert sorted(file.name for file in export.iterdir()) == [
            "MANIFEST.json",
            "README.md",
            "config.json",
            "index.json",
            "model.safetensors",
            "state.json",
        ]
        ts.verify_checkpoint(export)


def test_shards_and_index_have_the_same_names(tmp_path: Path) -> None:
    index = write_shards(tmp_path / "shards", Net())
    content = json.loads(index.read_text())
    del content["weight_map"]["head.bias"]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointDamagedError, match=r"does not name 'head\.bias', which a file"):
        ts.warm_start(Net(), index)
    twice = json.dumps(content).replace('"weight_map": {', '"weight_map": {"head.weight": "other.safetensors", ')
    index.write_text(twice)
    with pytest.raises(CheckpointDamagedError, match=r"'head\.weight' occurs twice"):
        ts.warm_start(Net(), index)


def test_the_number_of_comparisons_grows_linearly_with_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [CountedName(f"{number}.weight") for number in range(200)]
    own = {name: torch.zeros(1) for name in names}
    monkeypatch.setattr(CountedName, "comparisons", 0)
    report, places = match_weights(nn.Module(), own, dict(own), "weights", strict=True)
    assert (len(report.loaded), len(places)) == (200, 200)
    with pytest.raises(ValueError, match=r"199\.weight"):
        reading._once([*((name, "a") for name in names), (CountedName("199.weight"), "b")])
    assert CountedName.comparisons < 20 * len(names)
