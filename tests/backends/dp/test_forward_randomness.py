"""Random numbers of the forward pass and of samples in private runs (finding D-C1)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import trainstack as ts
from tests.helpers.modules import FEATURES, Noisy, numbers, weights
from tests.helpers.private_runs import LIMIT, Recorded, Shaped, private, promise
from trainstack.backends.dp import sampling
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import Unsupported
from trainstack.backends.dp.modes.bookkeeping import BookkeepingMode
from trainstack.backends.dp.modes.draw_refusal import DrawRefusal
from trainstack.backends.dp.modes.loop import LoopMode
from trainstack.backends.dp.modes.vmap import VmapMode
from trainstack.backends.dp.random_functions import HANDLERS
from trainstack.backends.dp.record_streams import _GOLDEN, RecordStreams, _mixed, _wrapped
from trainstack.backends.random_streams import RandomStreams, set_torch_state
from trainstack.backends.workload import Draw
from trainstack.trainer.resume.module_generators import without_generators
from trainstack.trainer.resume.restoring import rng_of_rank

MODES = {"loop": LoopMode, "vmap": VmapMode, "bookkeeping": BookkeepingMode}


def secret(mode: str = "vmap", **changes: Any) -> ts.DifferentialPrivacyArguments:
    return promise(**{"noise_multiplier": 0.0, "grad_mode": mode, "dataset_size": 20, "delta": 1e-2, **changes})


class Records(Dataset[Any]):
    """Records with noise of all generators of the host and of a separate one with a constant seed."""

    def __init__(self, count: int = 20) -> None:
        self.base, self.own = Noisy(count), np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.base[index]
        return inputs + float(self.own.normal()), label


def step_of(module: Any, directory: Path, args: ts.DifferentialPrivacyArguments, **changes: Any) -> Tensor:
    """The clipped sum of the first step, on all 20 records."""
    ts.seed_everything(0)
    changes = {"train_batch_size": 20, "epochs": 1, "gpu_batch_size_limit": 20, **changes}
    ts.Trainer(module, private(directory, args, **changes)).train()
    released: Tensor = module.released[-1] * 20
    return released


def leave_out(record: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one record out of all samples; the others keep their indices."""
    draw = sampling.PoissonSampling.draw

    def without(self: Any, step: int) -> Draw:
        drawn = draw(self, step)
        return Draw(local=drawn.local[drawn.local != record], total=drawn.total)

    monkeypatch.setattr(sampling.PoissonSampling, "draw", without)


class Draws(Recorded):
    """Draws noise in `train_step` too."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        x = batch[0] + 0.5 * torch.randn_like(batch[0]) + torch.rand(1, FEATURES) * random.random() + np.random.rand()
        return nn.functional.cross_entropy(self.net(x), batch[1])


def test_numbers_of_records_are_mixed_as_splitmix64_does() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # the first three of seed 0
    counters = torch.tensor([_wrapped(count * _GOLDEN) for count in (1, 2, 3)])
    assert _mixed(counters).tolist() == list(map(_wrapped, published))


def test_all_of_the_state_of_torchs_generator_is_set() -> None:
    streams, generator = RandomStreams.from_seed(1), torch.Generator()
    marker = set_torch_state(generator, streams.at("place"))
    words = streams.at("place").random_raw(1 + 312)[1:].view(np.uint32)
    twister = np.random.MT19937(0)
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}

    drawn = torch.empty(2000, dtype=torch.int32).random_(generator=generator).numpy()

    assert (drawn == (twister.random_raw(2000) % 2**31).astype(np.int32)).all()
    assert generator.initial_seed() == marker


class Counting:
    """A source of equally spaced numbers."""

    def uniform(self, like: Tensor) -> Tensor:
        return torch.linspace(0.0, 0.9, like.numel()).reshape(like.shape)

    normal = uniform


@pytest.mark.parametrize("func", [F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout])
def test_a_dropout_writes_to_its_input_only_in_place(func: Any) -> None:
    given = torch.arange(1.0, 25.0).reshape(2, 3, 4)
    made = []
    for inplace in (False, True):
        x = given.clone()
        made.append(HANDLERS[func](Counting(), func, x, 0.5, True, inplace))
        assert (made[-1] is x) == inplace
        assert torch.equal(x, given) != inplace
    assert torch.equal(*made)
    assert not torch.equal(made[0], given)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_draws_only_with_dropout_and_in_training(kind: Any) -> None:
    x = numbers(4).tensors[0][None]
    for guard, error in ((RecordStreams(1), Unsupported), (DrawRefusal("loop", nn.Linear(1, 1)), ts.PrivacyError)):
        net = kind(FEATURES, 3, num_layers=2, dropout=0.5)
        with guard:
            with pytest.raises(error, match="draws random numbers"):
                net(x)
            assert torch.equal(net.eval()(x)[0], net(x)[0])
            net.train().dropout = 0.0
            assert net(x)[0].requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_with_record_streams_a_record_moves_sums_within_the_limit(mode: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    x, y = numbers(12).tensors
    index = torch.arange(12)

    def run(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] + torch.randn(batch[0].shape) * torch.bernoulli(torch.full_like(batch[0], 0.5))
        return nn.functional.cross_entropy(model(x + torch.rand_like(x)), batch[1])

    def clipped_sum(seed: int, rows: Tensor, kind: Any) -> Tensor:
        gradients = kind(net, list(net.parameters()), FlatClipper(1.0))
        with RecordStreams(seed) as streams:
            carried = streams.attach(run, (x[rows] * 100, y[rows]), rows, step=4)
            gradients.add(*carried, len(rows))
        return torch.cat([part.flatten() for part in gradients.pop_sums()])

    for seed in range(50 if mode == "bookkeeping" else 3):
        whole = clipped_sum(seed, index, MODES[mode])
        assert torch.allclose(whole, clipped_sum(seed, index, LoopMode), atol=1e-5)
        for record in range(5):
            moved = float((whole - clipped_sum(seed, index[index != record], MODES[mode])).norm())
            assert 0.01 < moved <= 1.001
    assert not torch.allclose(whole, clipped_sum(99, index, MODES[mode]), atol=1e-2)


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "workers"), [("vmap", 2), ("loop", 0), ("bookkeeping", 0)])
def test_a_run_with_a_debug_seed_moves_by_the_limit(
    mode: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = secret(mode, debug_seed=3)
    module = Draws if mode != "bookkeeping" else Recorded
    sums = [step_of(module(Records(), dropout=0.5), tmp_path / "whole", args, gpu_batch_size_limit=7)]
    leave_out(3, monkeypatch)
    loader = {"num_workers": workers} if workers else {}
    sums.append(step_of(module(Records(), dropout=0.5, **loader), tmp_path / "less", args))
    assert 0.01 < float((sums[0] - sums[1]).norm()) <= LIMIT * 1.001


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("dataset", [numbers, Records])
def test_seeds_of_the_script_do_not_determine_the_masks(mode: str, dataset: Any, tmp_path: Path) -> None:
    made = [Recorded(dataset(20), dropout=0.5 if dataset is numbers else 0.0) for _ in range(2)]
    assert (weights(made[0]) == weights(made[1])).all()  # initial weights may be public
    sums = [step_of(module, tmp_path / str(i), secret(mode, debug_seed=None)) for i, module in enumerate(made)]
    assert float((sums[0] - sums[1]).norm()) > 0.01


@pytest.mark.parametrize(("mode", "passes"), [("bookkeeping", 4), ("vmap", 4), ("loop", 20)])
def test_micro_batches_have_equal_numbers_of_python_and_numpy(mode: str, passes: int, tmp_path: Path) -> None:
    """A record that is left out moves others to another micro-batch, which must not change their numbers."""
    seen: list[tuple[float, ...]] = []

    class Mixed(Recorded):
        own = np.random.default_rng(0)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            seen.append((global_step, random.random(), np.random.rand(), self.own.random()))
            return super().train_step(global_step, batch, device)

    step_of(Mixed(numbers(20)), tmp_path, secret(mode, debug_seed=None), gpu_batch_size_limit=6, epochs=3)
    second, third = ([drawn[1:] for drawn in seen if drawn[0] == step] for step in (2, 3))
    assert len(second) == len(third) == passes
    assert len(set(second)) == len(set(third)) == 1
    assert not {*second[0]} & {*third[0]}


class SeedsInHooks(Recorded):
    """Seeds all generators in each hook, and holds one with a constant seed."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, dropout=0.5)
        self.own = torch.Generator().manual_seed(0)

    def _seed(self, *args: Any) -> None:
        ts.seed_everything(0)
        torch.random.manual_seed(0)

    on_begin_train_epoch = on_end_backward = on_end_train_step = _seed

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        x = batch[0] + torch.rand(batch[0].shape, generator=self.own)
        return nn.functional.cross_entropy(self.net(x), batch[1])


def test_seeds_of_hooks_and_callbacks_have_no_effect(tmp_path: Path) -> None:
    modules = [SeedsInHooks(numbers(20)) for _ in range(2)]
    for i, module in enumerate(modules):
        args = private(tmp_path / str(i), secret(debug_seed=None), train_batch_size=20, epochs=2)
        trainer = ts.Trainer(module, args)
        for event in set(ts.Event) - {ts.Event.INIT}:
            trainer.on(event)(lambda *_: ts.seed_everything(0))
        trainer.train()
    first, second = (torch.stack(module.released) for module in modules)
    assert ((first - second).norm(dim=1) > 0.01).all()
    assert (first[0] - first[1]).norm() > 0.01


from random import seed as seed_of_python  # noqa: E402 - under a name that no patch of a module changes

from numpy.random import seed as seed_of_numpy  # noqa: E402
from torch import manual_seed as seed_of_torch  # noqa: E402


def _in_a_fork() -> None:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        torch.rand(1)


SEEDS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.manual_seed(0),
    "torch by name": lambda: seed_of_torch(0),
    "torch's generator": lambda: torch.default_generator.manual_seed(0),
    "torch in a fork": _in_a_fork,
    "a state of torch": lambda: torch.set_rng_state(torch.Generator().manual_seed(0).get_state()),
    "a generator": lambda: torch.rand(2, generator=torch.Generator().manual_seed(0)),
    "python": lambda: random.seed(0),
    "python by name": lambda: seed_of_python(0),
    "a state of python": lambda: random.setstate(random.Random(0).getstate()),
    "numpy": lambda: np.random.seed(0),
    "numpy by name": lambda: seed_of_numpy(0),
    "a state of numpy": lambda: np.random.set_state(np.random.RandomState(0).get_state()),
    "all": lambda: ts.seed_everything(0),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_in_train_step_is_refused(seed: str, tmp_path: Path) -> None:
    class Seeds(Recorded):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            SEEDS[seed]()
            return super().train_step(global_step, batch, device)

    with pytest.raises(ts.PrivacyError, match=r"seed|random state|torch.Generator"):
        step_of(Seeds(numbers(20)), tmp_path, secret(debug_seed=None))
    np.random.seed(0)  # as outside of private training
    assert random.seed is seed_of_python
    assert torch.random.manual_seed(0) is torch.default_generator


def test_a_state_that_train_step_has_read_may_be_set(tmp_path: Path) -> None:
    class Keeps(Recorded):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            state, python = torch.get_rng_state(), random.getstate()
            random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)
            loss = super().train_step(global_step, batch, device)
            torch.set_rng_state(state)
            random.setstate(python)
            return loss

    step_of(Keeps(numbers(20), dropout=0.5), tmp_path, secret(debug_seed=None))


class Checkpointed(nn.Module):
    """Repeats the first part of its forward pass in the backward pass, if asked to."""

    def __init__(self, repeats: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, 8), nn.Dropout(0.5))
        self.last, self.repeats = nn.Sequential(nn.Tanh(), nn.Linear(8, 3)), repeats

    def train_step(self, batch: Any) -> Tensor:
        x = checkpoint(self.first, batch[0], use_reentrant=False) if self.repeats else self.first(batch[0])
        return nn.functional.cross_entropy(self.last(x), batch[1])


def test_gradient_checkpointing_repeats_the_numbers_of_each_record(tmp_path: Path) -> None:
    released = []
    for repeats in (True, False):
        module = Shaped(Checkpointed(repeats), numbers(20), range(20))
        args = private(tmp_path / str(repeats), secret("loop", debug_seed=3), train_batch_size=20)
        ts.Trainer(module, args).train()
        released.append(module.made.seen[0])
    assert torch.allclose(released[0], released[1])


class Unknown(random.Random):
    """A generator that cannot be seeded."""

    def seed(self, *args: Any, **kwargs: Any) -> None:
        if hasattr(self, "ready"):
            raise TypeError("no seeds")
        self.ready = True


@pytest.mark.parametrize("holder", ["module", "dataset"])
def test_a_generator_that_cannot_be_seeded_is_refused(holder: str, tmp_path: Path) -> None:
    module: Any = Recorded(Records())
    if holder == "module":
        module.own = Unknown()
    else:
        module.dataset.own = Unknown()
    trainer = ts.Trainer(module, private(tmp_path, secret(debug_seed=None), train_batch_size=20))
    with pytest.raises(ts.PrivacyError, match=r"cannot be seeded"):
        trainer.train()


def test_states_of_generators_are_removed_from_old_states() -> None:
    old = {
        "values": [[("generators", "rng"), 1], [("module", "generators"), 2]],
        "added": [("generators", "other"), ("user", "count")],
    }
    assert without_generators(old) == {"values": [[("module", "generators"), 2]], "added": [("user", "count")]}
    assert without_generators({"values": old["values"][:1], "added": old["added"][:1]}) is None
    assert without_generators(None) is None


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("debug_seed", [None, 3])
def test_no_random_state_is_in_a_file(debug_seed: int | None, tmp_path: Path) -> None:
    parts: list[bytes] = []

    class Watched(SeedsInHooks):
        def on_end_train_step(self, *args: Any) -> None:
            torch_words = torch.get_rng_state().numpy()[24 : 24 + 8 * 624].view(np.uint64).astype(np.uint32)
            python: Any = random.getstate()[1]
            numpys: Any = np.random.get_state(legacy=False)["state"]["key"]
            own = self.own.get_state().numpy()[24 : 24 + 8 * 624].view(np.uint64).astype(np.uint32)
            for words in (torch_words, np.array(python[:-1], dtype=np.uint32), numpys, own):
                parts.extend(
                    words[at : at + 4].astype(kind).tobytes() for at in (1, 300) for kind in (np.uint32, np.uint64)
                )
                parts.extend(",".join(map(str, words[at : at + 3])).encode() for at in (1, 300))

    saves = ts.DefaultCheckpointerArguments(checkpoint=True, every_n_steps=1)
    args = {"train_batch_size": 20, "epochs": 3, "checkpointer_args": saves, "writers": ["csv", "jsonl"]}
    module = Watched(numbers(23))
    trainer = ts.Trainer(module, private(tmp_path, secret(debug_seed=debug_seed, dataset_size=40), **args))
    trainer.train()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("checkpoint" in str(path) for path in files)
    for path in files:
        text = path.read_bytes().replace(b" ", b"").replace(b"\n", b"")
        raw = path.read_bytes()
        assert not any(part in raw or part in text for part in parts), path


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("old", [False, True])
def test_two_resumes_from_one_checkpoint_draw_different_numbers(
    old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions stored the random states of private runs."""
    taken = ts.DefaultCheckpointerArguments(checkpoint=True)
    changes: dict[str, Any] = {"train_batch_size": 20, "checkpointer_args": taken}
    args = secret(debug_seed=None)
    ts.Trainer(Recorded(numbers(20), dropout=0.5), private(tmp_path / "first", args, epochs=1, **changes)).train()
    if old:

        def with_states(*given: Any) -> Any:
            ts.seed_everything(0)
            states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
            states |= {"torch": torch.get_rng_state()}
            found: Any = rng_of_rank(*given)
            begin = {**found["begin"], "training_rng": states}
            return {**found, "now": states, "epoch": states, "begin": begin}

        monkeypatch.setattr("trainstack.trainer.run.run_states.rng_of_rank", with_states)
    released = []
    for copy in ("a", "b"):
        ts.seed_everything(0)
        module = Recorded(numbers(20), dropout=0.5)
        shutil.copytree(tmp_path / "first", tmp_path / copy)
        ts.Trainer(module, private(tmp_path / copy, args, epochs=2, resume=True, **changes)).train()
        released.append(module.released[-1])
    assert (released[0] - released[1]).norm() > 1e-3
