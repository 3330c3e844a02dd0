"""Tensor subclasses in checkpoints."""

import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainstack as ts
from trainstack import _tensor_classes
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.encoding import StateEncoder
from trainstack.errors import CheckpointDamagedError, ConfigurationError, UnsupportedStateError


class Way(enum.Enum):
    DOWN = 1
    UP = 2


class Halves(Tensor):
    """A tensor that consists of two inner tensors."""

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor, way: Way) -> Any:
        return Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype, device=high.device)  # type: ignore[attr-defined]

    def __init__(self, high: Tensor, low: Tensor, way: Way) -> None:
        self.high, self.low, self.way = high, low, way

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high", "low"], {"way": self.way}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, attributes: Any, size: Any, stride: Any) -> Any:
        return cls(inner["high"], inner["low"], attributes["way"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].high.detach(), args[0].low.detach(), args[0].way)
        raise NotImplementedError(f"{func} of a tensor in halves")


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensor_classes, "_registered", {})
    ts.register_tensor_class(Halves, "tests.Halves")
    ts.register_tensor_class(Way)


def halves() -> Any:
    return Halves(torch.randn(3, 2), torch.zeros(3, 2, dtype=torch.int8), Way.UP)


@pytest.mark.usefixtures("_registered")
def test_a_registered_class_is_stored_as_its_inner_tensors() -> None:
    encoder, one = StateEncoder(), halves()
    tree = encoder.encode({"w": one})
    tensors = encoder.pop_tensors()
    assert sorted(tensors) == ["w.high", "w.low"]
    back = StateDecoder(tensors).decode(tree)["w"]
    assert type(back) is Halves
    assert torch.equal(back.high, one.high)
    assert back.way is Way.UP


def test_an_unregistered_class_is_refused_with_a_correction() -> None:
    with pytest.raises(UnsupportedStateError, match="register_tensor_class"):
        StateEncoder().encode({"w": halves()})


@pytest.mark.usefixtures("_registered")
def test_a_name_in_a_file_is_never_imported() -> None:
    encoder = StateEncoder()
    tree = encoder.encode({"w": halves()})
    tree["w"]["name"] = "os.system"
    with pytest.raises(ConfigurationError, match=r"class 'os\.system'"):
        StateDecoder(encoder.pop_tensors()).decode(tree)
    encoder = StateEncoder()
    tree = encoder.encode({"w": halves()})
    tree["w"]["name"] = f"{Way.__module__}.Way"  # registered, and no tensor
    with pytest.raises(CheckpointDamagedError, match="is not a Tensor"):
        StateDecoder(encoder.pop_tensors()).decode(tree)


def test_only_suitable_classes_are_registered() -> None:
    with pytest.raises(ConfigurationError, match="must be a subclass of torch"):
        ts.register_tensor_class(dict)
    with pytest.raises(ConfigurationError, match="names another class"):
        ts.register_tensor_class(Way, "torchao.OptimState8bit")


class InHalves(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                before = self.state[p]["sum"].high if "sum" in self.state[p] else 0.0
                total = before + p.grad
                self.state[p]["sum"] = Halves(total, torch.zeros(p.shape, dtype=torch.int8), Way.DOWN)
                p.data -= 0.01 * total


def adamw_8bit(parameters: Any) -> Any:
    return pytest.importorskip("torchao.optim").AdamW8bit(parameters, lr=0.01, block_size=64)


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("optimizer", [InHalves, adamw_8bit], ids=["halves", "torchao"])
def test_states_of_optimizers_resume_exactly(optimizer: Any, tmp_path: Path) -> None:
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :1])

    def train(folder: str, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 1))
        module = ts.SupervisedModule(model, nn.MSELoss(), optimizer, data)
        fixed: Any = {"train_batch_size": 4, "writers": [], "progress": "none", "log_level": "ERROR"}
        trainer = ts.Trainer(module, ts.TrainerArguments(output_dir=tmp_path / folder, **fixed, **options))
        trainer.train()
        return list(module.parameters())

    whole = train("whole", epochs=2)
    train("part", epochs=1)
    assert all(map(torch.equal, whole, train("part", epochs=2, resume=True)))
