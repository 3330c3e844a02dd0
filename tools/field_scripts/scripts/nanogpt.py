"""nanoGPT, train.py: endless random windows, accumulation, clipping, a cosine by step, an evaluation at step 0."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tools.field_scripts.training import loader, train, weights_of
from trainstack import ModuleInterface, schedulers

BLOCK, VOCABULARY, WIDTH = 8, 30, 16
MICRO, ACCUMULATION, STEPS, EVERY = 4, 3, 12, 4
RATE, WARMUP, LOWEST = 1e-2, 3, 1e-3


def get_lr(step):
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    ratio = (step - WARMUP) / (STEPS - WARMUP)
    return LOWEST + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (RATE - LOWEST)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.ln1, self.ln2, self.ln_f = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, 2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.ln2(x))
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


TEXT = torch.randint(VOCABULARY, (400,), generator=torch.Generator().manual_seed(0))


def window(start):
    return TEXT[start : start + BLOCK], TEXT[start + 1 : start + 1 + BLOCK]


class RandomWindows(IterableDataset):
    def __iter__(self):
        draw = torch.Generator().manual_seed(1)
        while True:
            yield window(int(torch.randint(300, (1,), generator=draw)))


class LastWindows(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return window(300 + BLOCK * index)


def plain():
    torch.manual_seed(1)
    model = GPT()
    optimizer = model.configure_optimizers()
    batches = iter(loader(RandomWindows(), batch_size=MICRO))
    losses = []

    def estimate_loss():
        model.eval()
        with torch.no_grad():
            found = [model(x, y) for x, y in loader(LastWindows(), batch_size=5)]
        model.train()
        losses.append(sum(loss.double() for loss in found) / len(found))

    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        if step % EVERY == 0:
            estimate_loss()
        for _ in range(ACCUMULATION):
            x, y = next(batches)
            loss = model(x, y) / ACCUMULATION
            loss.backward()
        # In the order of the optimizer, as trainstack clips: in another order the last bit of the norm may differ.
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [*weights_of(model), torch.tensor(losses, dtype=torch.float32)]


class NanoGPT(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model = GPT()

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(RandomWindows(), batch_size=batch_size)

    def get_val_dataloaders(self, sampler, batch_size):
        return DataLoader(LastWindows(), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        optimizer = self.model.configure_optimizers()
        return optimizer, schedulers.by_step(optimizer, get_lr)

    def train_step(self, global_step, batch, device):
        return self.model(*batch)

    def val_step(self, global_step, batch, device):
        return self.model(*batch)


def port():
    torch.manual_seed(1)
    module = NanoGPT()
    trainer = train(
        module,
        validate_first=True,
        max_steps=STEPS,
        train_batch_size=MICRO * ACCUMULATION,
        gpu_batch_size_limit=MICRO,
        val_batch_size=5,
        validate_every=EVERY,
        clip_grads=True,
    )
    losses = [record.value for record in trainer.history.records("val/loss") if record.step < STEPS]
    return [*weights_of(module.model), torch.tensor(losses, dtype=torch.float32)]
