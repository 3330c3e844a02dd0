"""Models of blocks with tied, frozen and shared parts, each trained for a few steps; for `run_world`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments, weights

TOKENS = torch.randint(11, (13, 4), generator=torch.Generator().manual_seed(3))
DATA = TensorDataset(TOKENS, TOKENS.sum(1) % 11)


class Block(nn.Module):
    """A residual block; `scale` is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Counting(Block):
    """Writes one buffer and replaces another in each training pass, and uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.mean = 0.5 * self.mean + 1.0
        return super().forward(x * (1 + 0.01 * self.passes)) + 0.01 * self.mean


class Language(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, blocks: Callable[[], list[nn.Module]] = lambda: [Block(), Block()]) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(blocks())
        self.head = nn.Linear(5, 11, bias=False)
        self.times = 1

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


def tied() -> nn.Module:
    model = Language()
    model.head.weight = model.table.weight
    return model


def tied_blocks() -> nn.Module:
    model = Language(lambda: [Block(), Block(), Block()])
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def shared_part() -> nn.Module:
    """Two blocks hold one module."""
    model = Language(lambda: [Block(), Block(), Block()])
    model.blocks[2].up = model.blocks[0].up
    return model


def frozen_parts() -> nn.Module:
    model = Language(lambda: [Block(), Block(), Block()])
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    model.table.requires_grad_(False)
    return model


def used_twice() -> nn.Module:
    model = Language()
    model.times = 2
    return model


def one_block_in_all_places() -> nn.Module:
    block = Block()
    return Language(lambda: [block, block, block])


class Sparse(Block):
    """A block with experts, of which a sample uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        first = x.mean((1, 2)) > 0
        out = x
        for expert, rows in zip(self.experts, (first, ~first), strict=True):
            out = out.index_add(0, rows.nonzero()[:, 0], expert(x[rows]))
        return out


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found, unused-ignore]

    config = LoraConfig(r=2, target_modules=["up", "down"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(Language(), config)  # type: ignore[no-any-return, arg-type, unused-ignore]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Language,
    "tied": tied,
    "tied blocks": tied_blocks,
    "shared part": shared_part,
    "frozen parts": frozen_parts,
    "used twice": used_twice,
    "one block in all places": one_block_in_all_places,
    "buffers": lambda: Language(lambda: [Counting(), Counting()]),
    "nested": lambda: Language(lambda: [nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())]),
    "experts in a block": lambda: Language(lambda: [Sparse(), Block()]),
    "LoRA": lora,
}


class Classifies(ts.ModuleInterface):
    """Next tokens by one of `MODELS`, in float64 with SGD and momentum, where a wrong factor of gradients shows."""

    gathered = ""  # the dtype of a weight within a training pass

    def __init__(self, name: str, units: list[str] | None = None, dtype: str = "float64") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = MODELS[name]().to(getattr(torch, dtype))
        self.units = units
        self.model.table.register_forward_hook(self._look) if name == "tied" else None

    def _look(self, part: Any, inputs: Any, output: Any) -> None:
        self.gathered = str(part.weight.dtype)

    def sharding_units(self) -> Any:
        return self.units

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3, momentum=0.9), None

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return self.build_dataloader(DATA, sampler, batch_size)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return self.build_dataloader(DATA, sampler, batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.train_step(global_step, batch, device)


def train(
    name: str, backend: str, units: list[str] | None = None, dtype: str = "float64", **given: Any
) -> dict[str, Any]:
    """Train two epochs of 13 samples in steps of 12; weights, losses, norms and the names of the units."""
    module = Classifies(name, units, dtype)
    args = arguments(
        "unused",
        backend=backend,
        epochs=2,
        train_batch_size=12,
        gpu_batch_size_limit=2,
        max_grad_norm=0.5,
        log_every=1,
        **given,
    )
    trainer = ts.Trainer(module, args)
    with warnings.catch_warnings():  # torch 2.13.0: its compiler asks each input for .grad, which warns
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        trainer.train()
    names = [name for name, part in module.named_modules() if type(part).__name__.startswith("FSDP")]
    return {
        "weights": weights(module).tolist(),
        "buffers": torch.cat([buffer.flatten() for buffer in module.buffers()] or [torch.zeros(1)]).tolist(),
        "losses": trainer.history.get_metric_values("train/loss") + trainer.history.get_metric_values("val/loss"),
        "norms": trainer.history.get_metric_values("train/grad_norm"),
        "units": names[1:],
        "gathered": module.gathered,
        "graphs": None if trainer._context.compiled is None else trainer._context.compiled.counts,
    }


def train_all(runs: list[dict[str, Any]], backend: str = "fsdp", older_torch: bool = False) -> list[dict[str, Any]]:
    """Several of these, in a world that was started once."""
    from torch.distributed.fsdp import FSDPModule

    setter = FSDPModule.__dict__.get("set_reduce_scatter_unused_params")
    if older_torch and setter is not None:
        del FSDPModule.set_reduce_scatter_unused_params
    try:
        return [train(backend=backend, **run) for run in runs]
    finally:
        if older_torch and setter is not None:
            FSDPModule.set_reduce_scatter_unused_params = setter  # type: ignore[method-assign]
