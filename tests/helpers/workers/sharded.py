"""Trainings under `fsdp`, for `run_world`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments, weights
from trainstack.backends.sharding.torch_groups import parameter_groups
from trainstack.checkpointing import default_checkpointer
from trainstack.checkpointing.weights import read_weights

DATA = TensorDataset(
    *(torch.randn(13, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (5, 1))
)


def model() -> nn.Module:
    """Layers whose rows 2 and 3 ranks cannot divide evenly; the last one has a single row."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def resumed(
    directory: str, backend: str, max_steps: int, replicate: int = 1, batch: int = 6, **options: Any
) -> dict[str, Any]:
    """Train `model` in `directory` up to a step, from where the last training there has ended.

    `options` are those of the checkpointer.
    """
    module = ts.SupervisedModule(
        model(), nn.MSELoss(), "adamw", DATA, val_dataset=DATA, optimizer_kwargs={"weight_decay": 0.5, "lr": 0.01}
    )
    args = arguments(
        directory,
        backend=backend,
        epochs=8,
        max_steps=max_steps,
        train_batch_size=batch,
        gpu_batch_size_limit=2,
        max_grad_norm=0.1,
        resume="auto",
        checkpointer_args=ts.DefaultCheckpointerArguments(**options),
        backend_options={"fsdp": {"replicate": replicate}} if replicate > 1 else {},
    )
    trainer = ts.Trainer(module, args, callbacks=[ts.callbacks.EMA(0.9)])
    trainer.train()
    optimizer = trainer.optimizers[0]
    shares = [entry["exp_avg"] for entry in optimizer.state.values()]
    local = sum((one.to_local() if backend == "fsdp" else one).numel() for one in shares)
    found = {
        "weights": weights(module).tolist(),
        "losses": trainer.history.get_metric_values("val/loss"),
        "elements": sum(one.numel() for one in shares),
        "own": local,
    }
    trainer.close()
    return found


class _Wrong(ts.SupervisedModule):
    """A module with a part that `fsdp` refuses."""

    def __init__(self, kind: str) -> None:
        super().__init__(model(), nn.MSELoss(), "sgd", DATA)
        self.kind = kind
        made: dict[str, Callable[[], Any]] = {
            "scalar": lambda: nn.Parameter(torch.zeros((), dtype=torch.float64)),
            "complex": lambda: nn.Parameter(torch.zeros(2, dtype=torch.complex128)),
            "strided": lambda: nn.Parameter(torch.zeros(3, 2, dtype=torch.float64).t()),
            "sparse": lambda: nn.Embedding(4, 2, sparse=True),
            "unused": lambda: nn.Linear(2, 2).double(),
        }
        if kind in made:
            self.extra = made[kind]()
        if kind == "hook":
            self.model[0].weight.register_hook(torch.neg)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if self.kind == "skips a unit":
            return self.model[0](batch[0]).sum()
        outputs = super().train_step(global_step, batch, device)
        return [outputs, self.model[0].bias] if self.kind == "returns a parameter" else outputs

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        if self.kind == "adds a parameter":
            self.late = nn.Parameter(torch.zeros(1))
        if self.kind == "late hook":
            self.model[0].weight.register_hook(torch.neg)


def refusals(kinds: list[str]) -> dict[str, str]:
    """The error that each kind of module ends with."""
    return {kind: _refusal(kind) for kind in kinds}


def _refusal(kind: str) -> str:
    options: dict[str, Any] = {"units": ["Attention"]} if kind == "unknown unit" else {}
    try:
        ts.Trainer(_Wrong(kind), arguments("unused", backend="fsdp", backend_options={"fsdp": options})).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


class _Looks(ts.SupervisedModule):
    """Asks for its state in each validation step."""

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        assert all(value.dim() for value in self.get_state().values())
        return super().val_step(global_step, batch, device)


def evaluated(directory: str, backend: str, **options: Any) -> list[float]:
    """Losses of validations within training over 1, 2 and 13 samples, and of one afterwards; and weights."""
    found = []
    for count in (1, 2, 13):
        some = torch.utils.data.Subset(DATA, range(count))
        module = _Looks(model(), nn.MSELoss(), "adamw", DATA, val_dataset=some)
        given = {"backend_options": {"fsdp": options}} if options else {}
        args = arguments(
            directory, backend=backend, epochs=2, train_batch_size=6, val_batch_size=1, validate_every=2, **given
        )
        trainer = ts.Trainer(module, args)
        trainer.train()
        found += trainer.history.get_metric_values("val/loss")
        found.append(trainer.validate(log=False).metrics["val/loss"])
        found += weights(module).tolist()
    return found


def exported(directory: str, backend: str) -> None:
    """Train two epochs and export to `directory`/export."""
    module = ts.SupervisedModule(model(), nn.MSELoss(), "adamw", DATA)
    trainer = ts.Trainer(module, arguments(directory, backend=backend, epochs=2, train_batch_size=6))
    trainer.train()
    trainer.export(Path(directory) / "export")


def read_export(directory: Path) -> dict[str, Tensor]:
    """The tensors of `exported`."""
    return dict(read_weights(directory / "export"))


def failing(directory: str, kind: str, async_save: bool) -> str:
    """Train with checkpoints at each epoch's end; rank 1 cannot write its part of the second one. Returns errors."""
    from trainstack.checkpointing import filesystem
    from trainstack.checkpointing.sharded import commit

    saves = 0
    write, report = filesystem.open_new, commit.report_part

    def open_new(path: Path) -> Any:
        if kind == "full" and saves == 2 and os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        return write(path)

    def report_part(ranks: Any, temporary: Path, parts: Any, abandoned: Any) -> Any:
        nonlocal saves
        saves += 1
        if kind == "killed" and saves == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hidden" and saves == 2 and os.environ["RANK"] == "1":
            temporary = Path(directory, "of another host", temporary.name)
        return report(ranks, temporary, parts, abandoned)

    default_checkpointer.report_part = report_part  # type: ignore[attr-defined]
    filesystem.open_new = open_new  # type: ignore[assignment]
    try:
        resumed(directory, "fsdp", 24, sharded=True, async_save=async_save)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        default_checkpointer.report_part, filesystem.open_new = report, write  # type: ignore[attr-defined]
    return "nothing was raised"


def unequal_states(directory: str) -> str:
    """Save a state of which rank 1 has a sharded tensor more than rank 0."""

    class Unequal(ts.SupervisedModule):
        def get_state(self) -> Any:
            state = super().get_state()
            if os.environ["RANK"] == "1":
                state["extra"] = next(iter(state.values()))
                state["other"] = state["extra"] + 1
            return state

    module = Unequal(model(), nn.MSELoss(), "sgd", DATA)
    options = ts.DefaultCheckpointerArguments(sharded=True)
    args = arguments(directory, backend="fsdp", epochs=1, train_batch_size=6, checkpointer_args=options)
    trainer = ts.Trainer(module, args)
    try:
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def gathers(directory: str) -> int:
    """How often all parameters became whole in a training that saves, and evaluates nothing."""
    from trainstack.backends.sharding import units

    found, gather_all = [0], units.gather_all

    def counted(given: Any) -> None:
        found[0] += 1
        gather_all(given)

    units.gather_all = counted
    try:
        module = ts.SupervisedModule(model(), nn.MSELoss(), "adamw", DATA)
        saves = ts.DefaultCheckpointerArguments(every_n_steps=1)
        args = arguments(directory, backend="fsdp", epochs=2, train_batch_size=6, checkpointer_args=saves)
        ts.Trainer(module, args).train()
    finally:
        units.gather_all = gather_all
    return found[0]


def trained_twice() -> list[list[float]]:
    """The weights of two trainings, one after the other, in a process group that the library did not make."""
    torch.distributed.init_process_group("gloo")
    found = []
    try:
        for _ in range(2):
            module = ts.SupervisedModule(model(), nn.MSELoss(), "adamw", DATA)
            trainer = ts.Trainer(module, arguments("unused", backend="fsdp", epochs=1, train_batch_size=6))
            trainer.train()
            found.append(weights(module).tolist())
            trainer.close()
    finally:
        torch.distributed.destroy_process_group()
    return found


class _CountsGradients(ts.SupervisedModule):
    """Counts the parameters whose whole gradient is kept after a backward pass."""

    most = 0

    def on_end_backward(self, global_step: int, loss: Any) -> None:
        groups = [one for part in self.modules() if isinstance(part, FSDPModule) for one in parameter_groups(part)]
        whole = [getattr(one, "_unsharded_param", None) for group in groups for one in group.fsdp_params]
        self.most = max(self.most, sum(one is not None and one.grad is not None for one in whole))


def whole_gradients(directory: str, reduce_each_pass: bool) -> int:
    """The most whole gradients that a step of three micro-batches keeps between them."""
    module = _CountsGradients(model(), nn.MSELoss(), "sgd", DATA)
    options = {"fsdp": {"reduce_each_pass": reduce_each_pass}}
    args = arguments(directory, backend="fsdp", backend_options=options, train_batch_size=12, gpu_batch_size_limit=2)
    ts.Trainer(module, args).train()
    return module.most
