"""The models that people fine-tune run in `bookkeeping`, and each record's gradient is that of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.private_shapes import run, trained
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.loop import LoopMode
from trainstack.backends.dp.modes.selection import choose_mode

RECORDS = 5


class Calling(nn.Module):
    """`step(model, batch)` on a dict of tensors."""

    def __init__(self, model: nn.Module, step: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self, stage: Any, global_step: int, batch: Any, device: torch.device) -> Tensor:
        return self.step(self.model, batch)


def its_own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def assert_fast_and_exact(module: nn.Module, batch: Any) -> None:
    module.train()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    mode = choose_mode("auto", module, trained(module), FlatClipper(1.0), run, batch, RECORDS)
    assert mode.name == "bookkeeping"
    loop = LoopMode(module, trained(module), FlatClipper(1.0))
    for limit in (1e6, 0.1):
        sums = []
        for each in (mode, loop):
            each.clipper = FlatClipper(limit)
            each.add(run, batch, RECORDS)
            sums.append(torch.cat([total.flatten() for total in each.pop_sums()]))
        assert float((sums[0] - sums[1]).norm()) <= 1e-6 * float(sums[1].norm())
    # One record at a time: a sum could hide that two records are exchanged.
    for i in range(RECORDS):
        one = {key: value[i : i + 1] for key, value in batch.items()}
        sums = []
        for each in (mode, loop):
            each.clipper = FlatClipper(1e6)
            each.add(run, one, 1)
            sums.append(torch.cat([total.flatten() for total in each.pop_sums()]))
        assert float((sums[0] - sums[1]).norm()) <= 1e-6 * float(sums[1].norm())


def tokens() -> dict[str, Tensor]:
    """Padded ids; one record has no padding, another is of one token."""
    torch.manual_seed(0)
    lengths = torch.tensor([8, 1, 5, 3, 8])
    mask = (torch.arange(8) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 50, (RECORDS, 8)) * mask, "attention_mask": mask}


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bert_with_an_attention_mask_is_exact(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SIZES, attn_implementation=attention)
    model = transformers.BertForSequenceClassification(config)
    assert_fast_and_exact(Calling(model, its_own_loss), {**tokens(), "labels": torch.tensor([0, 1, 0, 1, 1])})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft about transformers
@pytest.mark.parametrize("lora", [False, True])
def test_gpt2_with_padded_labels_is_exact(attention: str, lora: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16, attn_implementation=attention
    )
    model = transformers.GPT2LMHeadModel(config)
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
        )
    batch = tokens()
    labels = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    labels[1, :] = batch["input_ids"][1, 0]  # a record of one token has nothing to predict otherwise
    assert_fast_and_exact(Calling(model, its_own_loss), {**batch, "labels": labels})


class HandWrittenLora(nn.Module):
    """`x (W + B A)^T` in both of the usual forms."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.weight, self.merged = nn.Parameter(torch.randn(6, 4), requires_grad=False), merged
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.weight + self.up @ self.down)
        return x @ self.weight.T + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("merged", [False, True])
def test_lora_written_by_hand_is_exact(merged: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(HandWrittenLora(merged), nn.Tanh(), nn.Linear(6, 3).requires_grad_(False))
    batch = {"x": torch.randn(RECORDS, 7, 4), "y": torch.randint(0, 3, (RECORDS,))}
    assert_fast_and_exact(Calling(net, lambda net, b: F.cross_entropy(net(b["x"]).mean(1), b["y"])), batch)


def test_a_cross_entropy_with_probabilities_as_targets_is_exact() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(RECORDS, 4), "y": torch.rand(RECORDS, 3).softmax(1)}
    assert_fast_and_exact(Calling(nn.Linear(4, 3), lambda net, b: F.cross_entropy(net(b["x"]), b["y"])), batch)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.last(self.second(F.relu(self.norm(self.first(x)), inplace=True))))


def test_a_residual_network_fixed_by_opacus_is_exact() -> None:
    validators = pytest.importorskip("opacus.validators")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    fixed = validators.ModuleValidator.fix(nn.Sequential(net, nn.Linear(8, 3)))
    assert not any(isinstance(part, nn.BatchNorm2d) for part in fixed.modules())
    batch = {"x": torch.randn(RECORDS, 3, 8, 8), "y": torch.randint(0, 3, (RECORDS,))}
    assert_fast_and_exact(Calling(fixed, lambda net, b: F.cross_entropy(net(b["x"]), b["y"])), batch)


def test_batch_norm_in_eval_mode_with_trained_scale_is_exact() -> None:
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Frozen(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    batch = {"x": torch.randn(RECORDS, 3, 8, 8), "y": torch.randint(0, 3, (RECORDS,))}
    assert_fast_and_exact(Calling(net, lambda net, b: F.cross_entropy(net(b["x"]), b["y"])), batch)
