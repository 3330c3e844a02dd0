"""Modules with sparse buffers are trained, saved and resumed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments
from tests.helpers.processes import run_world
from tests.helpers.workers.sparse import train_with_sparse_buffers
from trainstack.checkpointing.difference import differences
from trainstack.cli.main import main

# torch 2.13.0 warns once in each process
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant checks")

SAVING = ts.DefaultCheckpointerArguments(keep_last=None)
MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "uncoalesced": lambda a: torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [1.0, 2.0, 3.0], a.shape),
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda a: a.to_sparse_bsr((2, 2)),
}


class Graph(nn.Module):
    """A layer that keeps a graph of 8 nodes as a sparse matrix."""

    def __init__(self, make: Callable[[Tensor], Tensor], persistent: bool, fill: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.register_buffer("adjacency", make(fill * torch.eye(8)), persistent=persistent)

    def forward(self, inputs: Tensor) -> Any:
        return torch.mm(self.adjacency.to_dense(), self.linear(inputs))  # type: ignore[operator]


def trained(folder: Path, network: nn.Module, **changes: Any) -> ts.Trainer:
    inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    module = ts.SupervisedModule(network, nn.MSELoss(), "adam", TensorDataset(inputs, inputs.sum(1, keepdim=True)))
    trainer = ts.Trainer(module, arguments(folder, **{"checkpointer_args": SAVING, **changes}))
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("layout", "persistent", "spec"),
    [*((layout, True, "sp") for layout in MAKERS), ("coo", False, "sp"), ("csr", False, "ddp"), ("coo", True, "ddp")],
)
def test_a_run_with_a_sparse_buffer_continues(layout: str, persistent: bool, spec: str, tmp_path: Path) -> None:
    make = MAKERS[layout]
    if persistent and layout == "coo":  # values of a checkpoint replace those of a new module
        first = trained(tmp_path, Graph(make, persistent, fill=2.0), backend=spec, nonfinite="skip")
    else:
        first = trained(tmp_path, Graph(make, persistent), backend=spec, nonfinite="skip")
    again = trained(tmp_path, Graph(make, persistent), backend=spec, epochs=2, resume=True)

    before, after = first.module.model.adjacency, again.module.model.adjacency
    assert after.layout is before.layout
    assert list(differences(before, after)) == []
    assert ("model.adjacency" in ts.read_model(tmp_path / "checkpoints" / "checkpoint-model-000000002")) == persistent


def test_the_command_line_shows_and_compares_sparse_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "one", Graph(Tensor.to_sparse, True))
    trained(tmp_path / "two", Graph(Tensor.to_sparse, True, fill=2.0))
    one, two = (str(tmp_path / name / "checkpoints" / "checkpoint-000000002") for name in ("one", "two"))
    assert main(["checkpoints", "show", one]) == main(["checkpoints", "diff", one, one]) == 0
    assert main(["checkpoints", "diff", "--model", one, two]) == 1
    assert "model['model.adjacency'].values: 8 elements differ, by at most 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "values"),
    [(Tensor.to_sparse, "nan"), (Tensor.to_sparse_csr, "inf")],
)
def test_a_sparse_buffer_that_becomes_nan_is_reported(
    make: Callable[[Tensor], Tensor], values: str, tmp_path: Path
) -> None:
    class Breaks(Graph):
        def forward(self, inputs: Tensor) -> Any:
            stored = self.adjacency._values if self.adjacency.layout is torch.sparse_coo else self.adjacency.values  # type: ignore[union-attr]
            stored().fill_(float(values))  # type: ignore[operator]
            return self.linear(inputs)

    with pytest.raises(ts.NonFiniteError, match=r"'model.adjacency' holds inf or nan after global step 2"):
        trained(tmp_path, Breaks(make, True))
    assert ts.list_checkpoints(tmp_path / "checkpoints") == []


@pytest.mark.filterwarnings("ignore")
def test_an_unstorable_buffer_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def quantized(_: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.quantize_per_tensor(torch.eye(8), 0.1, 0, torch.qint8)

    class Uses(Graph):
        def forward(self, inputs: Tensor) -> Any:
            return torch.mm(self.adjacency.dequantize(), self.linear(inputs))  # type: ignore[operator]

    with pytest.raises(ts.ConfigurationError, match=r"'model.adjacency' is a quantized tensor .*persistent=False"):
        trained(tmp_path, Uses(quantized, True))
    trained(tmp_path, Uses(quantized, False))
    trained(tmp_path, Uses(quantized, True), checkpointer_args=ts.DefaultCheckpointerArguments(checkpoint=False))


def test_indices_out_of_range_are_refused(tmp_path: Path) -> None:
    """With them torch would read and write outside of the tensor."""
    network = Graph(lambda a: torch.sparse_coo_tensor([[7], [7]], [1.0], a.shape), True)
    network.adjacency._indices().fill_(1000)  # type: ignore[operator]
    path = ts.export_model({"adjacency": network.adjacency}, tmp_path / "export")
    with pytest.raises(ts.CheckpointDamagedError, match="cannot be decoded"):
        ts.read_model(path)


@pytest.mark.distributed
def test_two_processes_get_the_sparse_buffers_of_the_first(tmp_path: Path) -> None:
    found = run_world(2, train_with_sparse_buffers, folder=str(tmp_path))

    assert found[0] == found[1]
    assert found[0]["diagonals"] == [[1.0] * 8] * 2
    assert found[0]["backend"] == "ddp"  # the default in a launched process
