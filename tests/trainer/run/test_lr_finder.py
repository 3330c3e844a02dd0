"""The search for a learning rate leaves no trace in the run that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, Hooked, Noisy, arguments, weights


class Line(ts.SupervisedModule):
    """A quadratic loss of curvature 2: rates above 1 diverge, rates far below 1 converge slowly."""

    def __init__(self) -> None:
        net = nn.Linear(1, 1, bias=False)
        nn.init.constant_(net.weight, 5.0)
        data = torch.utils.data.TensorDataset(torch.ones(64, 1), torch.zeros(64, 1))
        super().__init__(net, nn.functional.mse_loss, "sgd", data, optimizer_kwargs={"lr": 1e-9})


class TestLearningRateFinder:
    @pytest.mark.parametrize("backend", ["sp", "sp-amp"])
    @pytest.mark.parametrize("trained", [False, True])
    def test_a_search_leaves_no_trace_in_the_run(self, backend: str, trained: bool, tmp_path: Path) -> None:
        results = []
        for searches in (False, True):
            torch.manual_seed(1)
            module = Hooked(dataset=Noisy(40), scheduler=not trained)  # a longer run refuses a cosine
            trainer = ts.Trainer(module, arguments(tmp_path, epochs=2, backend=backend, log_every=2))
            if trained:
                trainer.train(epochs=1)
            if searches:
                ts.find_lr(trainer, start=1e-4, end=10, steps=20)
            trainer.train(epochs=2)
            results.append((weights(module), torch.cat([b.double().flatten() for b in module.buffers()])))
            results[-1] += (trainer.history.to_dict(), module.steps)

        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert results[0][2:] == results[1][2:]

    def test_it_suggests_a_rate_at_which_a_run_learns(self, tmp_path: Path) -> None:
        trainer = ts.Trainer(Line(), arguments(tmp_path, clip_grads=False))
        found = ts.find_lr(trainer, start=1e-5, end=100, steps=120)

        assert found.suggestion is not None
        assert 1e-3 < found.suggestion < 1.0
        assert len(found.rates) == len(found.losses) < 120
        ratios = [b / a for a, b in zip(found.rates, found.rates[1:], strict=False)]
        assert ratios == pytest.approx([1e7 ** (1 / 119)] * len(ratios))
        assert found.losses[0] == pytest.approx(25.0)

    def test_overflowing_steps_change_neither_rates_nor_losses(self, tmp_path: Path) -> None:
        changes: dict[str, Any] = {"backend": "sp-amp", "backend_options": {"amp": {"init_scale": 2.0**20}}}
        found = [
            ts.find_lr(ts.Trainer(Line(), arguments(tmp_path, clip_grads=False, **more)), start=1e-3, end=1, steps=20)
            for more in ({}, changes)
        ]

        assert len(found[0].rates) == 20
        assert found[1].rates == found[0].rates
        assert found[1].losses == pytest.approx(found[0].losses, rel=1e-2, abs=1e-2)

    def test_a_step_without_items_ends_the_search(self, tmp_path: Path) -> None:
        class Nothing(Classifier):
            def batch_weight(self, batch: Any) -> float:
                return 0.0

        found = ts.find_lr(ts.Trainer(Nothing(), arguments(tmp_path)), steps=20)
        assert (found.rates, found.suggestion) == ((), None)

    @pytest.mark.parametrize("warms_up", [False, True])
    def test_rates_of_groups_keep_their_proportion(self, warms_up: bool, tmp_path: Path) -> None:
        seen: list[tuple[float, ...]] = []

        class Groups(Classifier):
            def get_optimizers_schedulers(self, *_: Any) -> Any:
                groups = [
                    {"params": part.parameters(), "lr": lr} for part, lr in ((self.net[0], 2.0), (self.net[3], 0.5))
                ]
                self.optimizer = torch.optim.SGD(groups, lr=1.0)
                return self.optimizer, ts.build_scheduler("warmup_cosine", warmup=2) if warms_up else None

            def train_step(self, *args: Any, **named: Any) -> Any:
                seen.append(tuple(group["lr"] for group in self.optimizer.param_groups))
                return super().train_step(*args, **named)

        trainer = ts.Trainer(Groups(), arguments(tmp_path))
        ts.find_lr(trainer, start=1e-3, end=1e-1, steps=3)
        assert seen == [pytest.approx((r, r / 4)) for r in (1e-3, 1e-2, 1e-1)]
        trainer.train()
        assert seen[3] == ((0.0, 0.0) if warms_up else (2.0, 0.5))

    def test_a_search_that_is_not_possible_is_refused(self, tmp_path: Path) -> None:
        class Inside(Classifier):
            def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
                ts.find_lr(self.trainer)  # type: ignore[arg-type]

        module = Inside()
        module.trainer = ts.Trainer(module, arguments(tmp_path))  # type: ignore[assignment]
        with pytest.raises(ts.ConfigurationError, match="training is running"):
            module.trainer.train()  # type: ignore[operator, union-attr]
        with pytest.raises(ts.ConfigurationError, match="would spend privacy"):
            ts.find_lr(ts.Trainer(Classifier(), arguments(tmp_path, backend="sp-dp")))
        with pytest.raises(ts.ConfigurationError, match="0 < start < end"):
            ts.find_lr(ts.Trainer(Classifier(), arguments(tmp_path)), start=1, end=1)
