"""`audit_module` tests a user's module on records of the user's own data, with dropout and augmentation on."""

from __future__ import annotations

import math
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainstack.auditing.canaries import check_private, gradient_noise
from trainstack.auditing.mechanism_probes import judge_noise
from trainstack.auditing.report import AuditReport, Finding
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.dp.checks import TOLERANCE, choose_probe_records
from trainstack.backends.workload import Draw
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage

_STEPS = 4
"""The number of updates whose noise is tested, in each of two runs."""

_WEIGHTS = 1 << 16
"""The number of weights of each parameter whose noise is tested."""


def audit_module(module: Any, args: Any, *, rounds: int = 5, records: int = 100) -> AuditReport:
    """Remove and replace records of a module's data, and test the noise on its parameters.

    There are three experiments. First, the run is prepared `rounds` times, as before each training: this checks the
    sums of a few records, without random numbers. Second, the sum of clipped gradients of `records` records is computed
    with
    dropout and augmentation on, with fixed random numbers for each record: if one is removed, it may move by C, and if
    one is replaced by another, by 2 C. Third, the updates of two short runs without records, which are only noise, are
    tested. The module is not trained, and nothing is written.

    Args:
        module: a `ModuleInterface`, as for a `Trainer`.
        args: the `TrainerArguments`, with a private backend and `differential_privacy_args`.
        rounds: the number of preparations.
        records: the number of records to remove and replace, one at a time. The sums cost about 2 `records`^2
            gradients.

    Raises:
        PrivacyError: a private run with this module would be refused for any records.
        ConfigurationError: the backend is not private, or a number is out of its range.
    """
    check_private(args.backend)
    if rounds < 1 or records < 2:
        raise ConfigurationError(f"rounds={rounds}, records={records}: write at least 1 round and 2 records.")
    problems = [problem for _ in range(rounds) for problem in _problems(module, args)]
    findings = [
        Finding(
            probe="neighbours",
            claim="a record moves the clipped sum by the clipping norm at most",
            seen=f"{rounds} batches, {len(problems)} problems" + (f": {problems[0]}" if problems else ""),
            p_value=float(not problems),
        ),
        *_influence(module, args, records),
        *_release(module, args),
    ]
    return AuditReport(subject=f"{type(module).__name__} on {args.resolved_backend}", findings=tuple(findings))


class _ReadyRun:
    """A prepared run whose steps are called one by one.

    Attributes:
        work: the module, its optimizers and its data.
    """

    def __init__(self, trainer: Any) -> None:
        self._stack = trainer.trainer_backend
        self.work = trainer._ready().loop.work
        self._micro_batch, self._batch = trainer.plan.micro_batch, trainer.plan.global_batch

    @property
    def statement(self) -> Any:
        """The current statement of the run."""
        return self._stack.privacy_statement()

    @property
    def norm(self) -> float:
        """The stated joint clipping norm."""
        return math.hypot(*self.statement.max_grad_norm)

    def released(self, index: Tensor | None = None) -> list[Tensor]:
        """The noisy sum over the records `index`, or of no records: for each parameter, in units of the clipping norm.

        It is always that of step 1, so that a record has the same random numbers each time.
        """
        norm = self.norm
        if index is not None:
            self._stack.sampling.draw = lambda step: Draw(local=index, total=float(len(index)))
            parts = torch.split(index, self._micro_batch)
            for part in parts:
                with self._stack.accumulate(self.work, part is parts[-1]):
                    self._stack.forward(self.work, Stage.TRAIN, self.work.data.fetch(part), 1)
        self._stack.clip(self.work)
        trained = [p for p in self.work.optimized_params if p.grad is not None]
        factor = self._batch / norm
        return [factor * p.grad.detach().cpu().double().flatten() for p in trained]


@contextmanager
def _ready_run(module: Any, args: Any, **private: Any) -> Iterator[_ReadyRun]:
    """A run with other privacy settings in a temporary folder. The module is not changed."""
    from trainstack.trainer import Trainer

    training = {part: part.training for part in module.modules()}
    with tempfile.TemporaryDirectory() as folder:
        own = args.differential_privacy_args.without_ledger()  # an audit releases nothing about the data
        changed = replace(own, **{**private, "on_unsafe": "report", "init_weights_are_public": True})
        quiet = replace(args, output_dir=folder, resume=False, writers=(), differential_privacy_args=changed)
        trainer = Trainer(module, quiet)
        try:
            run = _ReadyRun(trainer)
            module.train()
            yield run
        finally:
            for parameter in module.parameters():
                parameter.grad = None
            for part, was_training in training.items():
                part.training = was_training
            trainer.close()


def _influence(module: Any, args: Any, records: int) -> Iterator[Finding]:
    """Remove each record, and replace each by another."""
    own: DifferentialPrivacyArguments = args.differential_privacy_args
    silent: dict[str, Any] = {
        "noise_multiplier": 0.0,
        "target_epsilon": None,
        "max_epsilon": None,
        "debug_seed": secrets.randbits(31),
    }
    if own.clipping == "adaptive":
        silent["clip_learning_rate"] = 1e-12
    with _ready_run(module, args, **silent) as run:
        index = choose_probe_records(run.work.data, min(records, run.work.data.length))
        whole = run.released(index)
        again = _influence_finding("the same records have the same sum again", _distance(whole, run.released(index)), 0)
        yield again
        if not again.holds:
            return  # records share random numbers, which would dominate the other distances
        left_out, replaced = [], []
        for place in range(len(index)):
            others = torch.cat([index[:place], index[place + 1 :]])
            left_out.append(_distance(whole, run.released(others)))
            swapped = index.clone()
            swapped[place] = _other(run.work.data.length, index)
            replaced.append(_distance(whole, run.released(swapped)))
        yield _influence_finding(f"each of {len(index)} records left out moves the sum by C at most", max(left_out), 1)
        yield _influence_finding("and replaced by another record by 2 C at most", max(replaced), 2)


def _influence_finding(claim: str, moved: tuple[float, int], allowed: float) -> Finding:
    distance, parameter = moved
    seen = f"{distance:.4f} C at most, most of it in trained parameter {parameter + 1}"
    return Finding(probe="own records", claim=claim, seen=seen, p_value=float(distance <= allowed + TOLERANCE))


def _other(length: int, index: Tensor) -> int:
    """A record that is not among `index`, or any record if all are."""
    while True:
        drawn = secrets.randbelow(length)
        if drawn not in index or len(index) == length:
            return drawn


def _distance(left: list[Tensor], right: list[Tensor]) -> tuple[float, int]:
    """The joint norm of the difference, and the parameter in which it is largest."""
    norms = [float((a - b).norm()) for a, b in zip(left, right, strict=True)]
    return math.hypot(*norms), max(range(len(norms)), key=norms.__getitem__)


def _release(module: Any, args: Any) -> Iterator[Finding]:
    """Test the updates of two short runs without records, by parameters, and the number of charges."""
    runs = []
    for _ in range(2):
        with _ready_run(module, args, debug_seed=None) as run:
            steps = max(1, min(_STEPS, run.statement.planned_steps))
            released = [run.released() for _ in range(steps)]
            stated = run.statement
        sigma = gradient_noise(args.differential_privacy_args, args.train_batch_size, stated.history[0][0])
        runs.append([torch.stack([part[:_WEIGHTS] for part in parts]) / sigma for parts in zip(*released, strict=True)])
    yield from judge_noise(*runs)
    yield Finding(
        probe="account",
        claim="every update is in the statement",
        seen=f"{steps} updates, {stated.steps} steps stated",
        p_value=float(stated.steps == steps),
    )


def _problems(module: Any, args: Any) -> tuple[str, ...]:
    """The reasons of one preparation for refusing the run."""
    with _ready_run(module, args, debug_seed=None) as run:
        overrides: tuple[str, ...] = run.statement.overrides
    return overrides
