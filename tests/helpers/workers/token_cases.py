"""Random trainings on token data: grouped by length, packed, and from several loaders."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import arguments, weights

KINDS = ("grouped", "packed", "min", "max", "cycle")
WORDS, ROW = 7, 12


@dataclass(frozen=True, kw_only=True)
class TokenCase:
    """One training.

    Attributes:
        kind: one of `KINDS`; the last three are modes of two loaders.
        lengths: of the documents of each loader.
        times: documents of the second loader for one of the first.
        grouped: whether the first loader groups by length.
        stop: the step after which the run is stopped.
    """

    kind: str
    lengths: tuple[tuple[int, ...], ...]
    times: int
    grouped: bool
    window: int | None
    shuffle: bool
    batch: int
    limit: int | None
    drop_last: bool
    adam: bool
    scheduled: bool
    seed: int
    stop: int


def draw_tokens(seed: int, number: int) -> TokenCase:
    """The case `number` of `seed`."""
    dice, kind = random.Random(f"{seed} {number}"), KINDS[number % len(KINDS)]
    loaders = 1 + (kind in KINDS[2:])
    batch, times = 6, dice.choice([1, 1, 2])  # of 2 and of 3 ranks
    counts = [dice.randint(12, 20) for _ in range(loaders)]
    return TokenCase(
        kind=kind,
        lengths=tuple((1, *(dice.randint(2, ROW) for _ in range(count - 1))) for count in counts),
        times=times,
        grouped=kind == "grouped" or (loaders > 1 and dice.random() < 0.4),
        window=dice.choice([None, 1, 9, 12]),
        shuffle=dice.random() < 0.8,
        batch=batch,
        limit=dice.choice([None, 1, 2, 3]),
        drop_last=dice.random() < 0.3,
        adam=dice.random() < 0.5,
        scheduled=dice.random() < 0.5,
        seed=dice.randrange(100),
        stop=dice.randint(1, 2),
    )


def documents(case: TokenCase) -> list[list[Tensor]]:
    """The documents of each loader."""
    draw = torch.Generator().manual_seed(case.seed)
    return [[torch.randint(1, WORDS, (n,), generator=draw) for n in part] for part in case.lengths]


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch in the form of packed rows, each with one document."""
    labels = [torch.cat([one["input_ids"].new_full((1,), -100), one["input_ids"][1:]]) for one in samples]
    columns = {name: [one[name] for one in samples] for name in samples[0]}
    columns["segment_ids"] = [torch.ones_like(one["input_ids"]) for one in samples]
    columns["position_ids"] = [torch.arange(len(one["input_ids"])) for one in samples]
    rows = {name: pad_sequence(parts, batch_first=True) for name, parts in columns.items()}
    return {**rows, "labels": pad_sequence(labels, batch_first=True, padding_value=-100)}


class TokenModel(nn.Module):
    """Predicts a token from the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(WORDS, 4, generator=draw, dtype=torch.float64))
        self.places = nn.Parameter(torch.randn(ROW, 4, generator=draw, dtype=torch.float64))
        self.head = nn.Parameter(torch.randn(4, WORDS, generator=draw, dtype=torch.float64))

    def scores(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        values = torch.tanh(self.embed[tokens] + self.places[positions])
        return (mask / mask.sum(-1, keepdim=True)) @ values @ self.head


class TokenModule(ts.ModuleInterface):
    """Trains a case; the loss is the mean over the labels of all loaders."""

    def __init__(self, case: TokenCase) -> None:
        super().__init__()
        self.case, self.net, self.stops = case, TokenModel(), False
        parts = documents(case)
        begins = [1 + len(parts[0]) * place for place in range(len(parts))]
        self.data: list[Any] = [
            [{"input_ids": one, "document": torch.full_like(one, begin + n)} for n, one in enumerate(part)]
            for begin, part in zip(begins, parts, strict=True)
        ]
        if case.kind == "packed":
            self.data[0] = ts.PackedDataset(self.data[0], ROW)
        self.seen: dict[int, list[int]] = {}

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        made = optimizer_of(self.case, self.net)
        if not self.case.scheduled:
            return made, None
        return made, torch.optim.lr_scheduler.StepLR(made, 2, gamma=0.5)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        case, found = self.case, []
        for place, (data, lengths) in enumerate(zip(self.data, case.lengths, strict=True)):
            order = sampler(data) if case.shuffle else torch.utils.data.SequentialSampler(data)
            if case.grouped and not place:
                order = ts.LengthGroupedSampler(lengths, window=case.window)
            size = batch_size * (case.times if place else 1)
            collate = None if case.kind == "packed" else pad
            found.append(DataLoader(data, size, sampler=order, collate_fn=collate, drop_last=case.drop_last))
        return found[0] if len(found) == 1 else {"one": found[0], "two": found[1]}

    def batch_weight(self, batch: Any) -> int:
        return sum(int((part["labels"][:, 1:] != -100).sum()) for part in _parts(batch))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for part in _parts(batch):
            if self.micro_batch.samples != ():  # not borrowed
                rows = [row.unique().tolist() for row in part["document"]]
                self.seen.setdefault(global_step, []).extend(one for row in rows for one in row if one)
            mask = ts.document_mask(part["segment_ids"], dtype=torch.bool)[:, 0].double()
            scores = self.net.scores(part["input_ids"], part["position_ids"], mask)[:, :-1]
            labels = part["labels"][:, 1:]
            total = total + nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
            count += int((labels != -100).sum())
        return total / count

    def on_end_train_step(self, global_step: int) -> None:
        if self.stops and global_step == self.case.stop:
            raise ts.StopTraining("interrupted")


def _parts(batch: Any) -> list[dict[str, Tensor]]:
    return [batch] if "labels" in batch else [part for part in batch.values() if part is not None]


def optimizer_of(case: TokenCase, net: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a case."""
    return torch.optim.Adam(net.parameters(), 0.05) if case.adam else torch.optim.SGD(net.parameters(), 0.5, 0.9)


def plain_tokens(case: TokenCase, steps: list[list[int]]) -> list[float]:
    """Weights after steps over these documents: a plain loop without padding, packing or micro-batches."""
    net, every = TokenModel(), [one for part in documents(case) for one in part]
    optimizer = optimizer_of(case, net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in steps:
        optimizer.zero_grad()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for number in step:
            tokens = every[number - 1]
            mask = torch.ones(len(tokens), len(tokens), dtype=torch.float64).tril()
            scores = net.scores(tokens, torch.arange(len(tokens)), mask)[:-1]
            total = total + nn.functional.cross_entropy(scores, tokens[1:], reduction="sum")
            count += len(tokens) - 1
        (total / count).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if case.scheduled:
            schedule.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def train_tokens(
    case: TokenCase, directory: str, backend: str, *, stops: bool = False, resume: bool = False
) -> dict[str, Any]:
    """Train a case, from a checkpoint with `resume`; the documents of each step, and the weights."""
    module = TokenModule(case)
    module.stops = stops
    saves = ts.DefaultCheckpointerArguments(checkpoint=stops or resume, every_n_steps=1 if stops else None)
    args = arguments(
        directory,
        epochs=3,
        train_batch_size=case.batch,
        gpu_batch_size_limit=case.limit,
        backend=backend,
        seed=case.seed,
        combine_loaders=case.kind if case.kind in KINDS[2:] else None,
        checkpointer_args=saves,
        resume=resume,
    )
    ts.Trainer(module, args).train()
    return {
        "seen": {step: sorted(found) for step, found in module.seen.items()},
        "weights": weights(module).tolist(),
    }


def random_tokens(seed: int, numbers: list[int], directory: str, backend: str = "ddp") -> list[dict[str, Any]]:
    """Train cases as a whole, and in two parts."""
    found = []
    for number in numbers:
        case, folder = draw_tokens(seed, number), f"{directory}/{number}"
        whole = train_tokens(case, f"{folder}/whole", backend)
        begun = train_tokens(case, f"{folder}/cut", backend, stops=True)
        rest = train_tokens(case, f"{folder}/cut", backend, resume=True)
        found.append({"whole": whole, "begun": begun, "rest": rest})
    return found
