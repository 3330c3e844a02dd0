"""A model with tied, shared, frozen and adapted parts, trained under options drawn at random; for `run_world`."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments, weights
from trainstack.backends.fsdp import whole

TOKENS = torch.randint(11, (13, 4), generator=torch.Generator().manual_seed(3))
DATA = TensorDataset(TOKENS, TOKENS.sum(1) % 11)
F64 = torch.float64
OPTIMIZERS = {"AdamW": {}, "Adagrad": {}, "SGD": {"momentum": 0.9}}


def drawn(seed: int) -> dict[str, Any]:
    """The parts of a run."""
    draw = random.Random(seed)
    chances = {"lora": 0.4, "shared": 0.3, "tied": 0.4, "frozen": 0.3, "unused": 0.2, "meta": 0.4, "freezer": 0.4}
    chances |= {"ema": 0.5, "recomputes": 0.3}
    found: dict[str, Any] = {name: draw.random() < chance for name, chance in chances.items()}
    chances = {"reduce_each_pass": 0.4, "gather_for_evaluation": 0.5, "reshard_after_forward": 0.7}
    return found | {
        "fsdp": {name: draw.random() < chance for name, chance in chances.items()},
        "optimizer": draw.choice(sorted(OPTIMIZERS)),
        "val_samples": draw.choice([1, 2, 3, 5, 13]),
        "val_batch": draw.choice([1, 2, 4]),
        "micro": draw.choice([1, 2, 3, None]),
        "sharded": draw.random() < 0.6,
        "async_save": draw.random() < 0.4,
    }


class Adapted(nn.Module):
    """A frozen layer plus a trained one of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 7, dtype=F64).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False, dtype=F64), nn.Linear(2, 7, bias=False, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Block(nn.Module):
    """A residual block with a vector of one element, and buffers of which one is not stored."""

    scale: Tensor
    table: Tensor

    def __init__(self, lora: bool) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(5, dtype=F64), nn.Linear(7, 5, dtype=F64)
        self.up: nn.Module = Adapted() if lora else nn.Linear(5, 7, dtype=F64)
        self.gain = nn.Parameter(torch.empty(1, dtype=F64))
        self.register_buffer("scale", torch.empty((), dtype=F64))
        self.register_buffer("table", torch.empty(5, dtype=F64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 1.1)
        self.scale.fill_(0.7)
        self.table.copy_(torch.arange(5) / 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.gain * self.out(torch.tanh(self.up(self.norm(x + self.table))))
        return out


class Language(nn.Module):
    """Embedding, three blocks, head."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5, dtype=F64)
        self.blocks = nn.ModuleList([Block(chosen["lora"]) for _ in range(3)])
        self.head = nn.Linear(5, 11, bias=False, dtype=F64)
        self.spare = nn.Linear(3, 2, dtype=F64) if chosen["unused"] else None
        if chosen["shared"]:
            self.blocks[2].up = self.blocks[0].up
        if chosen["tied"]:
            self.head.weight = self.table.weight
        if chosen["frozen"]:
            self.blocks[1].out.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


class Mixed(ts.ModuleInterface):
    """Trains a `Language` in two parameter groups."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        super().__init__()
        self.chosen = chosen
        torch.manual_seed(4)
        with torch.device("meta" if chosen["meta"] else "cpu"):
            self.model = Language(chosen)

    def get_optimizers_schedulers(self, *sizes: Any) -> Any:
        name, parameters = self.chosen["optimizer"], list(self.parameters())
        groups = [
            {"params": [p for p in parameters if (p.dim() > 1) is wide], "weight_decay": 0.1 * wide}
            for wide in (True, False)
        ]
        optimizer = getattr(torch.optim, name)(groups, lr=0.05, **OPTIMIZERS[name])
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return self.build_dataloader(DATA, sampler, batch_size)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return self.build_dataloader(Subset(DATA, range(self.chosen["val_samples"])), sampler, batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.train_step(global_step, batch, device)


def resumed(seed: int, backend: str, directory: str, max_steps: int, replicate: int = 1) -> dict[str, list[float]]:
    """Train up to a step, from where the last training in `directory` has ended; all that must not depend on ranks."""
    chosen = drawn(seed)
    module = Mixed(chosen)
    callbacks: list[ts.Callback] = [ts.callbacks.EMA(0.9, use_at_end=False)] if chosen["ema"] else []
    callbacks += [ts.callbacks.Freezer("model.blocks.0", until_epoch=1)] if chosen["freezer"] else []
    options = {**chosen["fsdp"], "replicate": replicate} if backend == "fsdp" else {}
    options |= {"find_unused_parameters": True} if chosen["unused"] and backend != "sp" else {}
    saving = ts.DefaultCheckpointerArguments(
        sharded=chosen["sharded"] and backend == "fsdp", async_save=chosen["async_save"], every_n_steps=1
    )
    args = arguments(
        directory,
        backend=backend,
        backend_options={backend: options} if options else {},
        epochs=4,
        max_steps=max_steps,
        train_batch_size=12,
        gpu_batch_size_limit=chosen["micro"],
        val_batch_size=chosen["val_batch"],
        max_grad_norm=0.3,
        log_every=1,
        resume="auto",
        checkpointer_args=saving,
        activation_checkpointing=chosen["recomputes"],
    )
    trainer = ts.Trainer(module, args, callbacks=callbacks)
    trainer.train()
    optimizer = trainer.optimizers[0]
    entries = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    states = [whole(entry[name]) for entry in entries for name in sorted(entry)]
    averages = trainer.events.callbacks["EMA"]._averages if chosen["ema"] else []  # type: ignore[attr-defined]
    found = {
        "weights": weights(module).tolist(),
        "states": [item for state in states for item in state.double().flatten().tolist()],
        "averages": [item for one in averages for item in whole(one).flatten().tolist()],
        "losses": trainer.history.get_metric_values("train/loss") + trainer.history.get_metric_values("val/loss"),
    }
    trainer.close()
    return found
