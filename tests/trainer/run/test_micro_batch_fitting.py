"""The micro-batch is halved before training until it fits into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, Hooked, Noisy, train, weights


class Hungry(Classifier):
    """Runs out of memory beyond `most` samples a forward pass."""

    def __init__(self, most: int, **changes: Any) -> None:
        super().__init__(**changes)
        self.most, self.sizes = most, []  # type: ignore[var-annotated]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("no memory for so many")
        return super().train_step(global_step, batch, device)


class TestFittingTheMicroBatch:
    @pytest.mark.parametrize("backend", ["sp", "sp-amp"])
    def test_it_is_halved_until_it_fits_with_the_same_result(
        self, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        changes: dict[str, Any] = {"epochs": 2, "backend": backend, "gpu_batch_size_limit": 64}
        plain = train(Hungry(99, dtype=torch.float64), tmp_path, **changes)
        module = Hungry(3, dtype=torch.float64)
        trainer = train(module, tmp_path, fit_micro_batch=True, **changes)

        assert module.sizes[:4] == [8, 4, 2, 2]
        assert (trainer.plan.micro_batch, trainer.plan.accumulation, module.plan) == (2, 4, trainer.plan)
        assert (trainer.train_step_batch_size, trainer.gradient_accumulation) == (2, 4), "as the plan says"
        assert trainer.view.batches_per_step == 4
        assert torch.allclose(weights(module), weights(plain.module), rtol=1e-12, atol=1e-12)
        assert trainer.history.get_metric_names() == plain.history.get_metric_names()
        assert "a micro-batch of 8 does not fit into memory: each step is split into 4 of 2" in caplog.text

    def test_the_trial_of_a_fitting_size_leaves_no_trace(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        results = []
        for fit in (False, True):
            torch.manual_seed(1)
            module = Hooked(dataset=Noisy(40))
            trainer = train(module, tmp_path, fit_micro_batch=fit, epochs=2)
            results.append((weights(module), trainer.history.to_dict(), module.steps))
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1:] == results[1][1:]
        assert "does not fit" not in caplog.text

    def test_a_single_sample_that_does_not_fit_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            train(Hungry(0), tmp_path, fit_micro_batch=True)

    def test_it_is_refused_where_a_trial_is_not_possible(self, tmp_path: Path) -> None:
        class Lists(Classifier):
            def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
                return [*super().get_train_dataloader(sampler, batch_size)]

        with pytest.raises(ts.ConfigurationError, match=r"fit_micro_batch=True.*it is a list"):
            train(Lists(), tmp_path, fit_micro_batch=True)
        with pytest.raises(ts.ConfigurationError, match=r"fit_micro_batch=True.*the run is private"):
            train(Classifier(), tmp_path, fit_micro_batch=True, backend="sp-dp")

    @pytest.mark.distributed
    def test_all_processes_use_the_size_that_fits_on_each(self) -> None:
        from tests.helpers.processes import run_world
        from tests.helpers.workers.micro_batch import hungry

        ranks = run_world(2, hungry, directory="unused")
        assert [rank["micro_batch"] for rank in ranks] == [1, 1]
        assert ranks[0]["weights"] == ranks[1]["weights"]
        assert ranks[0]["rates"] == ranks[1]["rates"]
        assert ranks[0]["sizes"][:4] == [6, 3, 1, 1]
