"""Packed rows of tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import arguments, weights

LENGTHS = [5, 9, 3, 12, 7, 2, 11, 4, 6, 8, 1, 10, 3, 5]


def documents(count: int = len(LENGTHS)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 30, (length,), generator=generator) for length in LENGTHS[:count]]


def test_rows_have_each_document_once_with_its_own_segment() -> None:
    data = documents()
    packed = ts.PackedDataset(data, 16, pad_token=29)
    found = []
    for row in (packed[index] for index in range(len(packed))):
        assert {name: tuple(values.shape) for name, values in row.items()} == dict.fromkeys(row, (16,))
        for segment in range(1, int(row["segment_ids"].max()) + 1):
            place = row["segment_ids"] == segment
            found.append(row["input_ids"][place])
            assert row["position_ids"][place].tolist() == list(range(len(found[-1])))
            assert row["labels"][place].tolist() == [-100, *found[-1][1:].tolist()]
        filled = row["segment_ids"] == 0
        assert (row["labels"][filled] == -100).all()
        assert (row["input_ids"][filled] == 29).all()

    assert sorted(map(Tensor.tolist, found)) == sorted(map(Tensor.tolist, data))
    assert len(packed) == -(-sum(LENGTHS) // 16) == 6
    assert ts.PackedDataset(data, 16, lengths=LENGTHS, shifts_labels=False)[0]["labels"][0] >= 0


def test_many_documents_leave_little_padding_and_never_overflow() -> None:
    lengths = [random.Random(index).randint(1, 400) for index in range(3000)]
    packed = ts.PackedDataset([torch.ones(length) for length in lengths], 1024, lengths=lengths)
    sums = [sum(lengths[sample] for sample in row) for row in packed._rows]

    assert sorted(sample for row in packed._rows for sample in row) == list(range(3000))
    assert max(sums) <= 1024
    assert sum(lengths) / (1024 * len(sums)) > 0.98


def test_all_columns_are_packed_without_their_padding() -> None:
    sample = {
        "input_ids": [4, 5, 6, 0],
        "attention_mask": [1, 1, 1, 0],
        "labels": [7, 8, 9, -100],
        "token_type_ids": [1, 1, 2, 0],
    }
    row = ts.PackedDataset([sample, sample], 8)[0]

    assert row["input_ids"].tolist() == [4, 5, 6, 4, 5, 6, 0, 0]
    assert row["labels"].tolist() == [-100, 8, 9, -100, 8, 9, -100, -100]
    assert row["token_type_ids"].tolist() == [1, 1, 2, 1, 1, 2, 0, 0]
    assert "attention_mask" not in row


def test_a_token_attends_to_its_own_document() -> None:
    segments = torch.tensor([[1, 1, 2, 0]])
    causal = ts.document_mask(segments)

    assert causal[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert ts.document_mask(segments, causal=False)[0, 0, 0].tolist() == [True, True, False, False]
    added = ts.document_mask(segments, dtype=torch.float32)
    assert added[0, 0, 1].tolist() == [0, 0, torch.finfo(torch.float32).min, torch.finfo(torch.float32).min]


class LanguageModel(ts.ModuleInterface):
    """GPT-2 with random weights over documents, packed or padded."""

    def __init__(self, packed: bool, attention: str) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            vocab_size=30,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            attn_implementation=attention,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = transformers.GPT2LMHeadModel(config).double()
        self.packed = packed
        self.data: Any = ts.PackedDataset(documents(), 24) if packed else documents()

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1), None

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        collate = None if self.packed else self.pad
        return DataLoader(self.data, batch_size, sampler=sampler(self.data), collate_fn=collate)

    def pad(self, rows: list[Tensor]) -> dict[str, Tensor]:
        masks = [torch.ones_like(row) for row in rows]
        tokens, mask = (nn.utils.rnn.pad_sequence(part, batch_first=True) for part in (rows, masks))
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}

    def batch_weight(self, batch: Any) -> float:
        return float((batch["labels"][:, 1:] != -100).sum())

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if self.packed:
            mask = ts.document_mask(batch.pop("segment_ids"), dtype=torch.float64)
            batch = {**batch, "attention_mask": mask}
        labels = batch.pop("labels")[:, 1:]
        logits = self.net(**batch, use_cache=False).logits[:, :-1]  # its own loss is computed in float32
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(packed: bool, attention: str) -> Tensor:
    """Weights after one update over all documents."""
    module = LanguageModel(packed, attention)
    changes = {"train_batch_size": len(module.data), "gpu_batch_size_limit": 3, "clip_grads": False}
    ts.Trainer(module, arguments("unused", **changes)).train()
    return weights(module)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_gets_the_gradient_of_separate_documents(attention: str) -> None:
    one, other = (trained(packed, attention) for packed in (True, False))

    start = weights(LanguageModel(True, attention))
    assert (one - start).abs().max() > 1e-3
    assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_data_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match="sample 3 has 12 tokens, more than row_length=8"):
        ts.PackedDataset(documents(), 8)
    with pytest.raises(ts.ConfigurationError, match="1 lengths were given for 14 samples"):
        ts.PackedDataset(documents(), 16, lengths=[1])
    changed = ts.PackedDataset(documents(1), 16, lengths=[3])
    with pytest.raises(ts.ModuleContractError, match="sample 0 has 5 tokens, and had 3"):
        changed[0]
    for sample, message in (
        ({"tokens": [1]}, "sample 0 has no 'input_ids'. It has"),
        ([], "sample 0 has no tokens"),
        ({"input_ids": [1, 2], "label": [1]}, "sample 0 has 2 tokens, and 'label' has shape"),
    ):
        with pytest.raises(ts.ModuleContractError, match=message):
            ts.PackedDataset([sample], 16)


def test_a_private_run_refuses_packed_rows(tmp_path: Path) -> None:
    class Rows(ts.SupervisedModule):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            data = torch.utils.data.Subset(ts.PackedDataset(documents(), 24), range(3))
            return DataLoader(data, batch_size, sampler=sampler(data))

    module = Rows(nn.Linear(1, 1), nn.MSELoss(), "sgd", documents())
    with pytest.raises(ts.PrivacyError, match="a row of a PackedDataset has several documents"):
        ts.Trainer(module, arguments(tmp_path, backend="sp-dp", train_batch_size=2)).train()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32])
def test_narrow_tokens_keep_labels_that_are_ignored(kind: Any) -> None:
    row = ts.PackedDataset([np.array([1, 2, 3], dtype=kind), np.array([4, 5], dtype=kind)], 8)[0]

    assert row["labels"].tolist() == [-100, 2, 3, -100, 5, -100, -100, -100]
    assert row["input_ids"].dtype == row["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([{"input_ids": [1, 2, 3], "w": [1, 1, 1]}, {"input_ids": [5, 6, 7, 8]}], "same fields"),
        ([[1] * 8, {"input_ids": [1, 2], "attention_mask": [0, 0]}], "attention_mask is 0"),
        ([torch.ones(1, 3, dtype=torch.long)], "batch dimension"),
        ([torch.ones(3)], r"write \.long"),
        (["abc"], "sample 0 is not a sequence of tokens"),
    ],
)
def test_samples_with_mismatched_columns_are_refused(samples: Any, words: str) -> None:
    with pytest.raises(ts.ModuleContractError, match=words):
        ts.PackedDataset(samples, 8)[0]
    with pytest.raises(ts.ConfigurationError, match=r"lengths\[1\]=0"):
        ts.PackedDataset([[1], [2]], 8, lengths=[1, 0])
