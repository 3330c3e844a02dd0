"""Parameter groups and optimizers by the names of parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts
from trainstack.errors import ConfigurationError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(self.norm(x))


DATA = TensorDataset(torch.arange(20) % 5, torch.randn(20, 1, generator=torch.Generator().manual_seed(0)))


def test_groups_have_layer_decay_and_no_weight_decay() -> None:
    net = Net()
    groups = ts.parameter_groups(net, lr=1.0, weight_decay=0.1, layer_decay=0.5)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(found) == len(list(net.parameters()))
    wanted = {net.embed.weight: 0.125, net.blocks[0].weight: 0.25, net.blocks[1].weight: 0.5, net.head.weight: 1.0}
    for parameter, lr in wanted.items():
        assert found[id(parameter)] == (lr, 0.1)  # type: ignore[arg-type]
    assert found[id(net.blocks[1].bias)] == (0.5, 0.0)
    assert found[id(net.norm.weight)] == (1.0, 0.0)


def test_parameters_that_match_no_decay_have_no_decay() -> None:
    net = Net()
    groups = ts.parameter_groups(net, lr=1.0, weight_decay=0.1, no_decay=["embed.*", "head.bias"])
    free = next(group for group in groups if not group["weight_decay"])
    assert {id(p) for p in free["params"]} == {id(net.embed.weight), id(net.head.bias)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"no_decay": ["heads.*"]}, "'heads.*', which matches no parameter"),
        ({"no_decay": "bias"}, "write a list"),
        ({"layer_decay": 1.5}, "above 0 and up to 1"),
    ],
)
def test_wrong_options_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.replace("*", r"\*")):
        ts.parameter_groups(Net(), lr=1.0, **options)
    with pytest.raises(ConfigurationError, match="requires layers with numbers"):
        ts.parameter_groups(nn.Linear(1, 1), lr=1.0, layer_decay=0.5)


def train(folder: Path, net: Net, optimizer: Any, **options: Any) -> ts.Trainer:
    module = ts.SupervisedModule(net, nn.MSELoss(), optimizer, DATA, **options)
    given: Any = {"train_batch_size": 5, "writers": [], "progress": "none", "log_level": "ERROR", "log_every": 1}
    args = ts.TrainerArguments(output_dir=folder, **given)
    trainer = ts.Trainer(module, args)
    trainer.train()
    return trainer


def test_a_dict_assigns_matrices_to_muon(tmp_path: Path) -> None:
    net = Net()
    seen: list[Any] = []
    spy = {"matrices": lambda p, lr: seen.append(list(p)) or torch.optim.Muon(seen[-1], lr=lr), "rest": "adamw"}
    options = {"matrices": {"lr": 0.02}, "rest": {"lr": 1e-3}}
    trainer = train(tmp_path, net, spy, optimizer_kwargs=options, scheduler="LinearLR")
    assert {id(p) for p in seen[0]} == {id(b.weight) for b in net.blocks} | {id(net.head.weight)}
    rates = [name for name in trainer.history.get_metric_names() if "lr" in name]
    assert len(rates) == 2, rates


def test_a_function_may_return_several_optimizers(tmp_path: Path) -> None:
    net = Net()

    def both(parameters: Any) -> list[torch.optim.Optimizer]:
        parts = ts.split_parameters(net, ["head.*", "rest"])
        return [torch.optim.SGD(parts["head.*"], lr=0.1), torch.optim.AdamW(parts["rest"])]

    before = [p.detach().clone() for p in net.parameters()]
    train(tmp_path, net, both)
    assert not any(map(torch.equal, before, net.parameters()))


def test_keys_without_matching_parameters_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Add the key 'rest'"):
        ts.split_parameters(Net(), ["matrices"])
    with pytest.raises(ConfigurationError, match="matches no parameter"):
        ts.split_parameters(Net(), ["nothing.*", "rest"])
    with pytest.raises(ConfigurationError, match="for each of these names"):
        ts.SupervisedModule(Net(), None, {"rest": "adamw"}, DATA, optimizer_kwargs={"lr": 0.1})
