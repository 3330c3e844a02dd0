"""Skipped steps, `find_lr`, `fit_micro_batch` and sanity checks leave no trace in the module and its optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train, weights
from trainstack.trainer.core.module_snapshot import ModuleSnapshot

Change = Callable[[Any, Tensor], object]


def assigned(module: Any, value: Tensor) -> None:
    module.running = 0.9 * module.running + 0.1 * value


def grown(module: Any, value: Tensor) -> None:
    module.seen = torch.cat([module.seen, value[:1]])


def resized(module: Any, value: Tensor) -> None:
    module.seen.resize_(len(module.seen) + 1)[-1] = value[0]


def registered(module: Any, value: Tensor) -> None:
    if "late" not in dict(module.named_buffers()):
        module.register_buffer("late", torch.zeros(6), persistent=False)
    module.late.add_(value)


def other_memory(module: Any, value: Tensor) -> None:
    module.running.data = module.running + value


CHANGES: dict[str, Change] = {
    "replaced": assigned,
    "in place": lambda module, value: module.running.mul_(0.9).add_(value),
    "under another name": lambda module, value: module.inner.shared.add_(value),
    "through a view": lambda module, value: module.view.add_(value[:2]),
    "through data": other_memory,
    "None at first": lambda module, value: setattr(module, "last", value.clone()),
    "None afterwards": lambda module, value: setattr(module, "first", None),
    "sparse": lambda module, value: setattr(module, "sparse", module.sparse + torch.eye(6).to_sparse() * value[0]),
    "sparse in place": lambda module, value: module.sparse.add_(torch.eye(6).to_sparse() * value[0]),
    "longer in each step": grown,
    "resized": resized,
    "registered in the step": registered,
}


class Carries(Classifier):
    """Changes buffers by `change` in each step."""

    def __init__(self, change: Change, **changes: Any) -> None:
        super().__init__(**{"dataset": numbers(40), "optimizer": torch.optim.AdamW, **changes})
        self.change = change
        self.register_buffer("running", torch.zeros(6))
        self.register_buffer("view", self.running[2:4], persistent=False)
        if change in (CHANGES["sparse"], CHANGES["sparse in place"]):
            self.register_buffer("sparse", torch.zeros(6, 6).to_sparse(), persistent=False)
        self.register_buffer("seen", torch.zeros(0), persistent=False)
        self.register_buffer("first", torch.ones(6))
        self.register_buffer("last", None, persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("shared", self.running)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.change(self, batch[0].mean(0))
        return super().train_step(global_step, batch, device)

    def buffers_now(self) -> dict[str, Any]:
        owners = [(f"{name}.{key}", b) for name, o in self.named_modules() for key, b in o._buffers.items()]
        values = {name: b if b is None else b.to_dense().tolist() for name, b in owners}
        return {**values, "transient": sorted(self._non_persistent_buffers_set), "shared": self.inner.shared.tolist()}


SOME = ["replaced", "in place", "resized", "registered in the step"]
TRIALS = [("find_lr", change) for change in CHANGES]
TRIALS += [(trial, change) for trial in ("fit_micro_batch", "sanity_val_steps") for change in SOME]


class TestBuffers:
    @pytest.mark.parametrize("change", CHANGES)
    def test_a_skipped_step_restores_them(self, change: str, tmp_path: Path) -> None:
        class Overflows(Carries):
            def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
                bad = float("nan") if global_step == 3 else 1.0
                return super().train_step(global_step, (batch[0] * bad, batch[1]), device)

        class LeavesOut(Carries):
            def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
                before = self.change
                self.change = (lambda *_: None) if global_step == 3 else before
                loss = super().train_step(global_step, batch, device)
                self.change = before
                return loss * (float("nan") if global_step == 3 else 1.0)

        modules = [kind(CHANGES[change]) for kind in (Overflows, LeavesOut)]
        for module in modules:
            trainer = train(module, tmp_path, nonfinite="skip")
            assert trainer.state.skipped_steps == 1

        assert modules[0].buffers_now() == modules[1].buffers_now()
        assert torch.equal(weights(modules[0]), weights(modules[1]))

    @pytest.mark.parametrize(("trial", "change"), TRIALS)
    def test_a_trial_restores_them(self, trial: str, change: str, tmp_path: Path) -> None:
        class Validates(Carries):
            def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
                if global_step == 0:
                    self.change(self, batch[0].mean(0))
                return batch[0]

        results = []
        for tries in (False, True):
            module = Validates(CHANGES[change], validate=trial == "sanity_val_steps")
            module.net[3].weight.grad = torch.ones(3, 8)
            given = {trial: 2 if "sanity" in trial else True} if tries and trial != "find_lr" else {}
            trainer = ts.Trainer(module, arguments(tmp_path, val_batch_size=8, **given))
            if tries and trial == "find_lr":
                before = module.buffers_now()
                ts.find_lr(trainer, start=1e-3, end=1e-2, steps=4)
                assert module.buffers_now() == before
                assert module.net[3].weight.grad.tolist() == torch.ones(3, 8).tolist()
            trainer.train()
            results.append((module.buffers_now(), weights(module).tolist()))
        assert results[0] == results[1]


class TestParametersAndOptimizers:
    def test_changes_of_a_step_are_undone(self, tmp_path: Path) -> None:
        """Parameters replaced and frozen, parts added and removed, groups added, settings and modes changed."""

        class Changes(Classifier):
            def __init__(self) -> None:
                super().__init__(numbers(40))
                self.spare, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
                self.free = nn.Parameter(torch.ones(2))  # of no optimizer

            def get_optimizers_schedulers(self, *_: Any) -> Any:
                made = [{"params": [*self.net.parameters()]}, {"params": [self.scale], "lr": self.rate}]
                self.made = torch.optim.AdamW(made, lr=0.1, foreach=False)
                self.made.state[self.scale]["wide"] = torch.full((3,), 1 / 3, dtype=torch.float32)
                return self.made

            rate = torch.tensor(0.5)

            def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
                if self.changes and global_step % 2:
                    self.free = nn.Parameter(torch.zeros(3))
                    self.net[0].weight.data = torch.ones(8, 6)
                    self.net[3].bias.requires_grad_(False)
                    self.net.append(nn.Linear(3, 3))
                    self.made.add_param_group({"params": [*self.net[-1].parameters()], "lr": 0.1})
                    self.made.param_groups[0]["weight_decay"] = 0.5
                    self.net[2].eval()
                    if "spare" in self._modules:
                        del self.spare
                return super().train_step(global_step, batch, device)

            changes = True

        def seen(module: Changes) -> list[Any]:
            groups, state = module.made.param_groups, module.made.state
            return [
                [(name, id(p), p.tolist(), p.requires_grad, p.dtype) for name, p in module.named_parameters()],
                [name for name, _ in module.named_modules()],
                [
                    (id(g), id(g["params"]), list(map(id, g["params"])), repr(g["lr"]), g["weight_decay"])
                    for g in groups
                ],
                [(id(p), id(s), [(k, id(v), v.tolist(), v.dtype) for k, v in s.items()]) for p, s in state.items()],
                [part.training for part in module.modules()],
            ]

        module = Changes()
        trainer = ts.Trainer(module, arguments(tmp_path, epochs=2))
        module.changes = False
        trainer.train(epochs=1)
        before, module.changes = seen(module), True
        ts.find_lr(trainer, start=1e-3, end=1e-2, steps=4)
        assert seen(module) == before

    def test_custom_state_methods_of_an_optimizer_are_used(self, tmp_path: Path) -> None:
        class Own(torch.optim.SGD):
            counted = 0

            def step(self, *args: Any, **kwargs: Any) -> Any:
                self.counted += 1
                return super().step(*args, **kwargs)

            def state_dict(self) -> Any:
                return {**super().state_dict(), "counted": self.counted}

            def load_state_dict(self, state: Any) -> None:
                self.counted = state.pop("counted")
                super().load_state_dict(state)

        trainer = ts.Trainer(Classifier(numbers(40), optimizer=Own), arguments(tmp_path))
        ts.find_lr(trainer, steps=4)
        assert trainer.optimizers[0].counted == 0  # type: ignore[attr-defined]

    @pytest.mark.parametrize("user", ["find_lr", "fit_micro_batch", "EMA", "Freezer"])
    def test_a_module_without_shapes_is_refused_with_a_correction(self, user: str, tmp_path: Path) -> None:
        class Lazy(Classifier):
            def __init__(self) -> None:
                super().__init__(numbers(16))
                self.net[0] = nn.LazyLinear(8)

        callbacks = {"EMA": [ts.callbacks.EMA()], "Freezer": [ts.callbacks.Freezer("net.0")]}.get(user, [])
        trainer = ts.Trainer(
            Lazy(), arguments(tmp_path, fit_micro_batch=user == "fit_micro_batch"), callbacks=callbacks
        )
        with pytest.raises(ts.ConfigurationError, match=r"the values of 'net\.0\.weight', .* on one batch before"):
            ts.find_lr(trainer) if user == "find_lr" else trainer.train()
        train(Lazy(), tmp_path)


def test_snapshots_reuse_copies_and_need_none_without_buffers() -> None:
    plain, normed = nn.Linear(2, 2), nn.BatchNorm1d(2)
    for module, copies in ((plain, 0), (normed, 3)):
        snapshot = ModuleSnapshot(module)
        snapshot.keep()
        kept = [value.copy for value in snapshot._values.values()]
        snapshot.keep()
        assert [value.copy.data_ptr() for value in snapshot._values.values()] == [copy.data_ptr() for copy in kept]
        assert len(kept) == copies


def test_restoring_keeps_graphs_usable_and_accepts_meta_tensors() -> None:
    module, source = nn.Module(), torch.ones(3, requires_grad=True)
    module.register_buffer("hidden", source * 2)
    module.register_buffer("meta", torch.zeros(2, device="meta"))
    module.register_buffer("empty", torch.zeros(0))
    snapshot = ModuleSnapshot(module)
    snapshot.keep()
    loss = (module.hidden**2).sum()
    module.hidden = module.hidden * 3
    snapshot.restore()
    loss.backward()

    assert source.grad is not None
    assert source.grad.tolist() == [8.0] * 3
    assert module.hidden.tolist() == [2.0] * 3
