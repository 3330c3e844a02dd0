"""Arguments that change the course of a run, one at a time."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import CLASSES, FEATURES, Classifier, Noisy, arguments, numbers, train, weights
from trainstack.checkpointing.directory import read_manifest

SAVING = ts.DefaultCheckpointerArguments()


class Counting(Classifier):
    """Keeps the inputs of its steps."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"dropout": 0.3, "validate": True, **changes})
        self.trained: list[Tensor] = []
        self.validated: list[Tensor] = []
        self.ended = 0

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.trained.append(batch[0])
        return super().train_step(global_step, batch, device)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.validated.append(batch[0])
        self.log("of_step", 1.0)
        return super().val_step(global_step, batch, device)

    def on_end_val_epoch(self, global_step: int, key: str = "default") -> None:
        self.ended += 1


def rows(batches: list[Tensor]) -> set[tuple[float, ...]]:
    return {tuple(row) for batch in batches for row in batch.tolist()}


class TestSanityCheck:
    @pytest.mark.spec("FN-30", "FN-29")
    def test_it_runs_some_batches_and_leaves_no_trace(self, tmp_path: Path) -> None:
        results = []
        for steps in (0, 2):
            torch.manual_seed(1)
            module = Counting(dataset=Noisy())
            trainer = train(module, tmp_path, sanity_val_steps=steps, val_batch_size=5, epochs=2)
            results.append((weights(module), trainer.history.to_dict(), module.ended, len(module.validated)))

        plain, tried = results
        assert torch.equal(plain[0], tried[0])
        assert plain[1:3] == tried[1:3]
        assert tried[3] == plain[3] + 2

    def test_it_finds_a_fault_before_the_first_step(self, tmp_path: Path) -> None:
        class Broken(Counting):
            def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
                raise AssertionError

            def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
                raise KeyError("labels")

        with pytest.raises(KeyError) as raised:
            train(Broken(), tmp_path, sanity_val_steps=1)
        assert "sanity_val_steps tested the validation" in " ".join(raised.value.__notes__)


class TestOverfitting:
    @pytest.mark.processes
    @pytest.mark.spec("FN-21", "F415")
    @pytest.mark.parametrize("workers", [0, 1])
    def test_few_batches_are_trained_on_and_validated(self, workers: int, tmp_path: Path) -> None:
        module = Counting(num_workers=workers)
        trainer = train(module, tmp_path, overfit_batches=2, epochs=3)

        assert trainer.plan.total_steps == 6
        assert len(rows(module.trained)) == 16
        assert rows(module.trained) == rows(module.validated)
        assert rows(module.trained) != rows([module.dataset.tensors[0][:16]])
        orders = [torch.cat(module.trained[i : i + 2]) for i in (0, 2)]
        assert not torch.equal(orders[0], orders[1])

    def test_it_validates_on_training_data_without_validation_data(self, tmp_path: Path) -> None:
        module = Counting(validate=False)
        assert train(module, tmp_path, overfit_batches=-1).plan.steps_per_epoch == 6
        assert len(rows(module.trained)) == len(rows(module.validated)) == 41

    def test_more_batches_than_exist_select_all(self, tmp_path: Path) -> None:
        assert train(Counting(), tmp_path, overfit_batches=9).plan.steps_per_epoch == 6

    def test_drop_last_drops_the_incomplete_batch(self, tmp_path: Path) -> None:
        class Full(Counting):
            def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
                return DataLoader(self.dataset, batch_size, sampler=sampler(self.dataset), drop_last=True)

        module = Full()
        assert train(module, tmp_path, overfit_batches=9).plan.steps_per_epoch == 5
        assert {len(batch) for batch in module.trained} == {8}

    def test_the_first_batches_of_a_list_are_kept(self, tmp_path: Path) -> None:
        class Lists(Counting):
            def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
                return [*super().get_train_dataloader(sampler, batch_size)]

        module = Lists()
        assert train(module, tmp_path, overfit_batches=1, epochs=2).plan.steps_per_epoch == 1
        assert len(module.trained) == len(module.validated) == 2
        assert len(rows(module.trained)) == 8
        assert rows(module.trained) == rows(module.validated)


class TestDevRun:
    @pytest.mark.parametrize(("wanted", "steps"), [(True, 1), (3, 3)])
    @pytest.mark.parametrize("backend", ["sp", "sp-dp"])
    def test_it_trains_and_validates_a_little_and_writes_nothing(
        self, wanted: bool | int, steps: int, backend: str, tmp_path: Path
    ) -> None:
        module = Counting()
        changes: dict[str, Any] = {"epochs": 5, "writers": ["csv"], "checkpointer_args": SAVING, "backend": backend}
        trainer = train(module, tmp_path, fast_dev_run=wanted, **changes)

        assert trainer.global_steps_finished == steps
        assert len(module.validated) == steps
        assert module.ended == 1
        left = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("privacy")]
        assert left == []
        assert (backend == "sp") == (not any(tmp_path.rglob("privacy*")))

    @pytest.mark.parametrize(("wanted", "ends"), [(True, [1]), (3, [3]), (8, [6])])
    @pytest.mark.parametrize("has_length", [True, False])
    def test_it_ends_an_epoch_so_that_every_hook_is_called(
        self, wanted: bool | int, ends: list[int], has_length: bool, tmp_path: Path
    ) -> None:
        class Hooked(Counting):
            ended_epochs: tuple[int, ...] = ()

            def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
                loader = super().get_train_dataloader(sampler, batch_size)
                return loader if has_length else iter([*loader])

            def get_optimizers_schedulers(self, *_: Any) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1), ts.build_scheduler("warmup_cosine")

            def on_end_train_epoch(self, global_step: int) -> None:
                self.ended_epochs += (global_step,)

        module = Hooked()
        trainer = train(module, tmp_path, fast_dev_run=wanted, max_steps=100)

        assert trainer.global_steps_finished == int(wanted)
        assert list(module.ended_epochs) == ends
        assert module.ended == 1 + (wanted == 8)
        assert len(trainer.history.records("val/loss")) == module.ended

    def test_it_calls_the_hook_at_the_end_of_an_epoch(self, tmp_path: Path) -> None:
        class Fails(Counting):
            def on_end_train_epoch(self, global_step: int) -> None:
                raise KeyError("labels")

        with pytest.raises(KeyError, match="labels"):
            train(Fails(), tmp_path, fast_dev_run=True)

    @pytest.mark.parametrize("longer", [{"epochs": 3}, {"max_steps": 15}], ids=str)
    def test_arguments_of_train_do_not_extend_it(self, longer: dict[str, int], tmp_path: Path) -> None:
        trainer = ts.Trainer(Counting(), arguments(tmp_path, fast_dev_run=2))
        for _ in range(2):
            trainer.train(**longer)
            assert trainer.global_steps_finished == 2

    def test_it_neither_resumes_nor_saves_with_a_given_checkpointer(self, tmp_path: Path) -> None:
        train(Counting(), tmp_path, checkpointer_args=SAVING)
        before = sorted(tmp_path.rglob("*"))
        mine = ts.DefaultCheckpointer(ts.DefaultCheckpointerArguments(save_dir=str(tmp_path / "checkpoints")))
        trainer = ts.Trainer(
            Counting(), arguments(tmp_path, fast_dev_run=True, resume=True, validate_every=0), checkpointer=mine
        )
        trainer.train()
        assert trainer.global_steps_finished == 1
        assert sorted(tmp_path.rglob("*")) == before


class TestMonitor:
    @pytest.mark.spec("FN-20", "F409")
    def test_it_selects_the_metric_of_the_best_checkpoint(self, tmp_path: Path) -> None:
        keeping = ts.DefaultCheckpointerArguments(keep_last=1, keep_best=1)
        trainer = train(
            Counting(), tmp_path, epochs=3, monitor="of_step", monitor_mode="max", checkpointer_args=keeping
        )
        assert trainer.checkpointer.args.monitor == "of_step"  # type: ignore[attr-defined]
        assert trainer.checkpointer.args.mode == "max"  # type: ignore[attr-defined]

    def test_an_unknown_metric_is_refused_with_the_nearest_name(self, tmp_path: Path) -> None:
        with pytest.raises(ts.ConfigurationError, match=r"no metric 'val/los'.*Did you mean 'val/loss'"):
            train(Counting(), tmp_path, monitor="val/los", monitor_mode="min")
        with pytest.raises(ts.ConfigurationError, match=r"monitor='thing'.*monitor_mode='min'"):
            ts.TrainerArguments(monitor="thing")
        with pytest.raises(ts.ConfigurationError, match="contradict each other"):
            ts.TrainerArguments(monitor="val/acc", checkpointer_args=ts.DefaultCheckpointerArguments(monitor="val/f1"))

    def test_the_monitor_of_the_checkpointer_is_that_of_the_run(self, tmp_path: Path) -> None:
        keeping = ts.DefaultCheckpointerArguments(keep_last=1, keep_best=1, monitor="of_step", mode="max")
        trainer = train(Counting(), tmp_path / "arguments", epochs=3, checkpointer_args=keeping)
        assert (trainer.args.monitor, trainer.args.monitor_mode) == ("of_step", "max")
        assert trainer.checkpointer.args.monitor == "of_step"  # type: ignore[attr-defined]
        given = ts.Trainer(Counting(), arguments(tmp_path / "given"), checkpointer=ts.DefaultCheckpointer(keeping))
        assert (given.args.monitor, given.args.monitor_mode) == ("of_step", "max")
        unset = ts.Trainer(Counting(), arguments(tmp_path / "unset"))
        assert unset.args.monitor is None

    def test_the_summary_shows_the_best_value_of_the_checkpointer(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keeping = ts.DefaultCheckpointerArguments(monitor="of_step", mode="max")
        train(Counting(), tmp_path, epochs=2, checkpointer_args=keeping, writers=["stdout"])
        assert re.search(r"best\W+of_step 1 in epoch 1", "".join(capsys.readouterr()))

    def test_a_wrong_monitor_of_the_checkpointer_raises_an_error(self, tmp_path: Path) -> None:
        keeping = ts.DefaultCheckpointerArguments(monitor="val/los", mode="min")
        with pytest.raises(ts.ConfigurationError, match=r"no metric 'val/los'.*Did you mean 'val/loss'"):
            train(Counting(), tmp_path, checkpointer_args=keeping)


class TestDeterminism:
    @pytest.mark.spec("HZ-09")
    @pytest.mark.parametrize("wanted", [True, "warn"])
    def test_it_is_set_only_while_the_trainer_runs(self, wanted: Any, tmp_path: Path) -> None:
        seen = []

        class Looks(Counting):
            def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
                warns = torch.is_deterministic_algorithms_warn_only_enabled()
                seen.append((torch.are_deterministic_algorithms_enabled(), warns))
                return super().train_step(global_step, batch, device)

        train(Looks(), tmp_path, deterministic=wanted, max_steps=1)
        train(Looks(), tmp_path, max_steps=1)
        assert seen == [(True, wanted == "warn"), (False, False)]
        assert not torch.are_deterministic_algorithms_enabled()

    def test_a_nondeterministic_operation_is_refused(self, tmp_path: Path) -> None:
        class Random(Counting):
            def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
                torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
                return super().train_step(global_step, batch, device)

        with pytest.raises(RuntimeError, match="deterministic"):
            train(Random(), tmp_path, deterministic=True)


MATMUL: Any = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


def precisions() -> list[str]:
    return [torch.get_float32_matmul_precision(), *(place.fp32_precision for place in MATMUL)]


class TestMatmulPrecision:
    @pytest.fixture(autouse=True)
    def same_afterwards(self) -> Iterator[None]:
        before = precisions()
        yield
        assert precisions() == before

    @pytest.mark.parametrize("wanted", ["highest", "high", "medium", None])
    def test_it_is_set_only_while_the_trainer_runs(self, wanted: Any, tmp_path: Path) -> None:
        seen, before = [], torch.get_float32_matmul_precision()

        class Looks(Counting):
            def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
                seen.append(torch.get_float32_matmul_precision())
                return super().train_step(global_step, batch, device)

        trainer = train(Looks(), tmp_path, float32_matmul_precision=wanted, max_steps=1)
        assert seen == [wanted or before]
        trainer.close()

    def test_it_is_restored_after_an_exception(self, tmp_path: Path) -> None:
        class Fails(Counting):
            def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
                raise ValueError(torch.get_float32_matmul_precision())

        with pytest.raises(ValueError, match="medium"):
            train(Fails(), tmp_path, float32_matmul_precision="medium")

    def test_a_conflicting_precision_of_torch_is_refused_and_kept(self, tmp_path: Path) -> None:
        kept, MATMUL[0].fp32_precision = MATMUL[0].fp32_precision, "tf32"
        try:
            with pytest.raises(ts.ConfigurationError, match=r"cuda.matmul.fp32_precision='tf32'.*Remove the argument"):
                train(Counting(), tmp_path, float32_matmul_precision="medium")
            train(Counting(), tmp_path, checkpointer_args=ts.DefaultCheckpointerArguments())
            assert MATMUL[0].fp32_precision == "tf32"
        finally:
            MATMUL[0].fp32_precision = kept

    def test_a_resume_with_another_precision_is_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        saving: dict[str, Any] = {"checkpointer_args": ts.DefaultCheckpointerArguments()}
        train(Counting(), tmp_path, float32_matmul_precision="high", **saving)
        info = ts.list_checkpoints(tmp_path / "checkpoints")[0]
        assert read_manifest(info.path).metadata["start"]["environment"]["float32 matmul precision"] == "high"
        train(Counting(), tmp_path, float32_matmul_precision="high", resume=True, epochs=2, **saving)
        assert "float32 matmul precision" not in caplog.text
        train(Counting(), tmp_path, resume=True, epochs=3, **saving)
        row = r"environment\.float32 matmul precision +high +highest +same samples, other bits"
        assert re.search(row, caplog.text)


def counting(graphs: list[Any]) -> Any:
    """A compiler backend that keeps the graphs and runs them unchanged."""

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return keep


class Mlp(nn.Module):
    """A user-defined network."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(inputs)))


class OfNetwork(Classifier):
    """Trains a network of the given kind."""

    def __init__(self, kind: str, samples: int = 41) -> None:
        super().__init__(numbers(samples))
        del self.net
        with torch.random.fork_rng():
            torch.manual_seed(0)
            half = nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU())
            self.network: Any = {
                "own": Mlp,
                "sequential": lambda: nn.Sequential(half, nn.Linear(4, CLASSES)),
                "encoder": lambda: nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0),
                "raw": lambda: nn.Linear(FEATURES, CLASSES),
            }[kind]()

    def scores(self, inputs: Any) -> Any:
        """The outputs of the network for `inputs`."""
        return self.network(inputs)[:, :CLASSES]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.scores(batch[0]), batch[1])


class TestCompiling:
    @pytest.mark.parametrize("backend", ["sp", "sp-amp"])
    def test_compiling_changes_neither_weights_nor_names(self, backend: str, tmp_path: Path) -> None:
        plain = train(Counting(dropout=0.0), tmp_path / "plain", epochs=2, backend=backend)
        module = Counting(dropout=0.0)
        changes = {"compile": {"backend": "eager"}, "checkpointer_args": SAVING, "backend": backend, "epochs": 2}
        compiled = train(module, tmp_path, **changes)

        assert module.net._compiled_call_impl is not None
        assert torch.allclose(weights(module), weights(plain.module))
        assert list(module.get_state()) == list(plain.module.get_state())
        resumed = train(Counting(dropout=0.0), tmp_path, epochs=3, resume=True, backend=backend)
        assert resumed.global_steps_finished == compiled.global_steps_finished + 6

    def test_user_compiled_models_are_saved_under_their_original_names(self) -> None:
        plain, wrapped = Counting(seed=1), Counting(seed=2)
        wrapped.net = torch.compile(wrapped.net, backend="eager")  # type: ignore[assignment]
        assert any("_orig_mod." in name for name in wrapped.state_dict())
        assert list(wrapped.get_state()) == list(plain.get_state())
        wrapped.update_state(plain.get_state())
        assert torch.equal(weights(wrapped), weights(plain))

    def test_losses_in_memory_that_each_step_reuses_are_kept(self, tmp_path: Path) -> None:
        """A model that is replayed as a CUDA graph does this. Here a custom compiler backend does."""

        def replaying(graph: Any, _: Any) -> Any:
            memory: list[torch.Tensor] = []

            def replay(*inputs: Any) -> Any:
                (loss,) = graph(*inputs)
                memory[:] = memory or [loss.detach().clone()]
                memory[0].copy_(loss.detach())
                loss.data = memory[0]
                return (loss,)

            return replay

        class Whole(nn.Module):
            def __init__(self, net: nn.Module) -> None:
                super().__init__()
                self.net = net

            def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                return nn.functional.cross_entropy(self.net(inputs), targets)

        class WithLoss(Counting):
            def __init__(self) -> None:
                super().__init__(dropout=0.0)
                self.net = Whole(self.net)  # type: ignore[assignment]

            def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
                return self.net(*batch)

            def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
                return None

        plain = train(WithLoss(), tmp_path / "plain")
        compiled = train(WithLoss(), tmp_path, compile={"backend": replaying})
        assert compiled.history.get_metric_values("train/loss_epoch") == pytest.approx(
            plain.history.get_metric_values("train/loss_epoch")
        )

    @pytest.mark.parametrize("kind", ["own", "sequential", "encoder"])
    def test_compiled_models_keep_their_hooks_and_names(self, kind: str, tmp_path: Path) -> None:
        graphs: list[Any] = []
        calls: list[str] = []
        module, plain = OfNetwork(kind, samples=16), OfNetwork(kind, samples=16)
        train(plain, tmp_path / "plain")
        train(module, tmp_path, compile={"backend": counting(graphs)})
        assert len(graphs) == 1
        assert torch.allclose(weights(module), weights(plain), atol=1e-6)
        module.network.register_forward_hook(lambda *_: calls.append("hook"))
        ts.Trainer(module, arguments(tmp_path, compile={"backend": counting(graphs)})).train()

        assert calls == ["hook"] * 2
        assert list(module.get_state()) == list(plain.get_state())
        for copied in (copy.deepcopy(module.network), pickle.loads(pickle.dumps(plain.network))):
            assert list(copied.state_dict()) == list(plain.network.state_dict())

    def test_a_hook_that_is_registered_in_training_is_called(self, tmp_path: Path) -> None:
        seen: list[int] = []

        class Registers(OfNetwork):
            def on_end_train_step(self, global_step: int) -> None:
                if global_step == 1:
                    self.network.register_forward_hook(torch.compiler.disable(lambda *_: seen.append(1)))

        train(Registers("sequential", samples=32), tmp_path, compile={"backend": "eager"})
        assert len(seen) == 3

    def test_a_forward_that_is_replaced_in_training_is_called(self, tmp_path: Path) -> None:
        seen: list[str] = []

        class Replaces(OfNetwork):
            def on_end_train_step(self, global_step: int) -> None:
                network = self.network
                if global_step == 1:
                    network.forward = torch.compiler.disable(lambda x: seen.append("own") or network[0](x))  # type: ignore[func-returns-value, method-assign]
                if global_step == 3:
                    del network.forward

        train(Replaces("sequential", samples=32), tmp_path, compile={"backend": "eager"})
        assert seen == ["own", "own"]

    # torch 2.13.0 warns while it traces a model whose input is the output of another one
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    def test_many_models_do_not_share_a_limit_of_recompilations(self, tmp_path: Path) -> None:
        graphs: list[Any] = []

        class Many(OfNetwork):
            def __init__(self) -> None:
                super().__init__("sequential", samples=8)
                self.network = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES)) for _ in range(9))  # type: ignore[assignment]
                self.last = nn.Linear(FEATURES, CLASSES)

            def scores(self, inputs: Any) -> Any:
                for part in self.network:
                    inputs = part(inputs)
                return self.last(inputs)

        train(Many(), tmp_path, compile={"backend": counting(graphs)})
        assert len(graphs) == 10

    def test_a_part_that_the_user_has_compiled_is_left_unchanged(self, tmp_path: Path) -> None:
        graphs: list[Any] = []
        module = OfNetwork("own", samples=8)
        module.network.compile(backend=counting(graphs))
        before = module.network._compiled_call_impl
        train(module, tmp_path, compile={"backend": "eager"})
        assert module.network._compiled_call_impl is before
        assert len(graphs) == 1

    def test_a_second_run_compiles_with_its_own_options(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        first: list[Any] = []
        second: list[Any] = []
        module = OfNetwork("sequential", samples=8)
        for folder, graphs in (("first", first), ("second", second)):
            train(module, tmp_path / folder, compile={"backend": counting(graphs)})
        assert (len(first), len(second)) == (1, 1)
        assert "no graph" not in caplog.text

    def test_the_report_counts_graphs_and_recompilations(self, tmp_path: Path) -> None:
        data = 17  # so that the last batch is short
        train(OfNetwork("sequential", samples=data), tmp_path, compile={"backend": "eager"}, report=True)
        assert '"1 model, 2 graphs, 1 recompilation"' in (tmp_path / "run.json").read_text()
        assert "1 model, 2 graphs, 1 recompilation" in (tmp_path / "report.html").read_text()

    def test_a_run_that_compiles_nothing_is_reported(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        class Around(OfNetwork):
            def scores(self, inputs: Any) -> Any:
                return self.network.out(torch.relu(self.network.hidden(inputs)))

        train(Around("own", samples=8), tmp_path, compile={"backend": "eager"})
        assert "compile: no graph was compiled" in caplog.text

        class Bare(OfNetwork):
            def __init__(self) -> None:
                super().__init__("own", samples=8)
                self.weight = nn.Parameter(torch.zeros(FEATURES, CLASSES))
                del self.network

        with pytest.raises(ts.ConfigurationError, match=r"compile=True: Bare has no part with parameters"):
            train(Bare(), tmp_path, compile=True)

    def test_a_private_run_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ts.ConfigurationError, match="compile=True in a private run"):
            train(Counting(), tmp_path, backend="sp-dp", compile=True)


class Images(ts.SupervisedModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        data = torch.utils.data.TensorDataset(torch.randn(16, 3, 4, 4), torch.arange(16) % 3)
        super().__init__(net, nn.functional.cross_entropy, "adam", data, optimizer_kwargs={"lr": 0.1})


def test_channels_last_convolutions_give_the_same_result(tmp_path: Path) -> None:
    plain, module = Images(), Images()
    layouts = []
    train(plain, tmp_path / "plain", epochs=3)
    module.model[0].register_forward_hook(
        lambda *call: layouts.append(call[-1].is_contiguous(memory_format=torch.channels_last))
    )
    train(module, tmp_path, epochs=2, channels_last=True, checkpointer_args=SAVING)
    assert layouts == [True] * 4
    resumed = Images()
    train(resumed, tmp_path, epochs=3, channels_last=True, resume=True)
    assert torch.allclose(weights(resumed), weights(plain), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sanity_val_steps": -2}, r"sanity_val_steps=-2: write a whole number, -1 or more"),
        ({"overfit_batches": 1.5}, r"overfit_batches=1.5: write a whole number, -1 or more"),
        ({"fast_dev_run": 0}, r"fast_dev_run=0: write a whole number, 1 or more"),
        ({"deterministic": "yes"}, r"deterministic='yes': write one of True, False, 'warn'"),
        ({"compile": "inductor"}, r"compile='inductor': write True, False, 'units' or a dict"),
        ({"channels_last": 1}, r"channels_last=1: write True or False"),
        ({"monitor": ""}, r"monitor='': write the name of a metric"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=said):
        ts.TrainerArguments(**changes)


@pytest.mark.parametrize("how", ["default", "context"])
def test_a_default_device_without_values_is_refused(how: str, tmp_path: Path) -> None:
    trainer = ts.Trainer(Classifier(numbers(8)), arguments(tmp_path))
    with pytest.raises(ts.ConfigurationError, match="torch's default device is 'meta'"):  # noqa: SIM117
        with torch.device("meta") if how == "context" else default_device("meta"):
            trainer.train()
    trainer.train()
    assert torch.isfinite(weights(trainer.module)).all()


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)
