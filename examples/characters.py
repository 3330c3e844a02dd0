"""Train a small transformer that writes like Python's manual, character by character. Copy this file and change it.

    python examples/characters.py
    python examples/characters.py --micro-batch 8

The text is part of Python: the help topics of `help("for")`. A sample is a paragraph. Paragraphs differ in length, so
a batch of 32 has two or three thousand characters, and the rest is padding. `batch_weight` returns the number of
characters. Both commands therefore train the same model, although the second splits each batch into four.

If a command was interrupted, start it again: it continues from the newest checkpoint.
"""

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from trainstack import (
    DefaultCheckpointerArguments,
    ModuleInterface,
    Trainer,
    TrainerArguments,
    build_scheduler,
    callbacks,
    seed_everything,
)

LONGEST = 128  # characters; longer paragraphs are cut
PADDING, BEGIN, END = 0, 2, 3  # control characters of ASCII that are in no text


def paragraphs(texts):
    """Each paragraph as a tensor of its characters' ASCII codes, between BEGIN and END."""
    pieces = [
        piece.encode("ascii", errors="replace") for text in texts for piece in text.split("\n\n") if piece.strip()
    ]
    cut = [piece[start : start + LONGEST - 2] for piece in pieces for start in range(0, len(piece), LONGEST - 2)]
    return [torch.tensor([BEGIN, *piece, END]) for piece in cut]


def pad(samples):
    """A batch of paragraphs, (n, length of the longest)."""
    return pad_sequence(samples, batch_first=True, padding_value=PADDING)


class Transformer(nn.Module):
    """Scores for each next character, (n, length, 128), from the characters so far, (n, length)."""

    def __init__(self, width, layers):
        super().__init__()
        self.characters, self.places = nn.Embedding(128, width), nn.Embedding(LONGEST, width)
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.02)  # torch's 1.0 takes much longer to train
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, 128)

    def forward(self, text):
        length = text.shape[1]
        hidden = self.characters(text) + self.places(torch.arange(length, device=text.device))
        later = torch.ones(length, length, dtype=torch.bool, device=text.device).triu(
            1
        )  # True: hidden, because it comes later
        return self.scores(self.layers(hidden, mask=later, is_causal=True))


class Writer(ModuleInterface):
    """Predicts the next character."""

    def __init__(self, width, layers):
        super().__init__()
        self.model = Transformer(width, layers)
        texts = [text for _, text in sorted(topics.items())]
        self.train_data: Any = paragraphs(text for number, text in enumerate(texts) if number % 10)
        self.val_data: Any = paragraphs(texts[::10])  # whole topics, so that no part of them is in the training data

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.train_data, batch_size, sampler=sampler(self.train_data), collate_fn=pad)

    def get_val_dataloaders(self, sampler, batch_size):
        return DataLoader(self.val_data, batch_size, sampler=sampler(self.val_data), collate_fn=pad)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.AdamW(self.parameters(), lr=4e-3), build_scheduler("warmup_cosine", warmup=0.1)

    def train_step(self, global_step, batch, device):
        scores, targets = self.model(batch[:, :-1]), batch[:, 1:]
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PADDING)

    val_step = train_step

    def batch_weight(self, batch):
        """The number of characters to predict, without padding: the loss is a mean over them."""
        return int((batch[:, 1:] != PADDING).sum())

    def write(self, begin, temperature=0.8, seed=0):
        """Continue `begin` until the end of the paragraph."""
        generator = torch.Generator().manual_seed(seed)
        text = [BEGIN, *begin.encode("ascii")]
        while len(text) < LONGEST and text[-1] != END:
            scores = self.model(torch.tensor([text], device=self.device))[0, -1].float().cpu()
            text.append(int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)))
        return bytes(text[1:]).rstrip(bytes([END])).decode("ascii")

    @property
    def device(self):
        return next(self.parameters()).device


def main():
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a small character-level transformer on Python's help topics.")
    parser.add_argument("--backend", default="sp", help="sp, sp-bf16, ddp, ... (default: sp)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, help="the number of updates, instead of --epochs")
    parser.add_argument("--micro-batch", type=int, default=32, help="paragraphs that fit into memory (default: 32)")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/characters"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    given = parser.parse_args()
    seed_everything(0)
    args = TrainerArguments(
        backend=given.backend,
        epochs=given.epochs,
        max_steps=given.max_steps,
        train_batch_size=32,
        gpu_batch_size_limit=given.micro_batch,
        val_batch_size=64,
        output_dir=given.output_dir,
        device=given.device,
        resume="auto",
        log_every=10,
        checkpointer_args=DefaultCheckpointerArguments(every_n_steps=20, keep_last=2),
    )
    averages = callbacks.EMA(0.99)  # evaluated and exported instead of the last weights
    patience = callbacks.EarlyStopping("val/loss", patience=2)
    module = Writer(given.width, given.layers)
    trainer = Trainer(module, args, callbacks=[averages, patience])
    trainer.train()
    bits = trainer.history.get_latest_metric("val/loss") / math.log(2)
    trainer.print(f"{bits:.2f} bits a character on topics that it has not read")
    with torch.no_grad():
        trainer.print(module.eval().write("The "))


if __name__ == "__main__":
    main()
