"""`PrivacyStatement`, the guarantee of a run, as text or JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from trainstack.errors import ConfigurationError

FORMAT = 2
"""The version of the JSON. From format 2 on, readers ignore unknown fields. Format 1 lacks the fields from `status` on.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOrigin:
    """The source of the initial weights of a run.

    Attributes:
        path: of the file or folder.
        digest: of its manifest; None for a bare file.
        backend: the backend string of its training; None without a manifest that has it.
        statement: the privacy statement of its training, if that was private.
    """

    path: str
    digest: str | None = None
    backend: str | None = None
    statement: PrivacyStatement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyStatement:
    """The guarantee of a run at this moment.

    Attributes:
        epsilon: an upper bound; None without a guarantee.
        delta: of the guarantee; None without one.
        overrides: the reasons why nothing is guaranteed; empty if `epsilon` holds.
        accountant: `"prv"`, `"rdp"` or `"pld"`. Without a privacy layer it is None, as are all fields below.
        eps_error: the usual largest distance of prv's bound from the true epsilon.
        history: (noise multiplier, sampling rate, steps) each.
        clipping, max_grad_norm: the clipping of each record's gradient; adaptive clipping gives the current norm.
        expected_batch_size, dataset_size: public constants, whose ratio is the sampling rate.
        planned_steps, max_epsilon: of the plan.
        stopped_by_budget: whether the next step would exceed `max_epsilon`.
        fixed_order_epsilon: the epsilon if batches were cut from an order that is fixed before the training.
        randomness: the source of the random numbers of sampling and noise.
        grad_mode, world_size: the way of the computation.
        unit, relation: the difference between neighbouring datasets.
        covered, not_covered: the scope of the guarantee.
        versions: of the packages, as (name, version).
        status: "running" if `history` contains all planned steps, so that the figures are a bound at every moment.
        run: the id of the run in a ledger.
        ledger: the path or address of the ledger.
        ledger_epsilon: of all runs together that charge the ledger of the dataset, at `delta`.
        before: the part of `history` that other runs spent on the same weights.
        clippings: (noise multiplier, sampling rate, steps, how gradients were clipped) each, of this run.
        notes: further lines of the statement, as (name, text).
    """

    epsilon: float | None
    delta: float | None
    overrides: tuple[str, ...]
    accountant: str | None = None
    eps_error: float | None = None
    history: tuple[tuple[float, float, int], ...] = ()
    clipping: str | None = None
    max_grad_norm: tuple[float, ...] = ()
    expected_batch_size: int | None = None
    dataset_size: int | None = None
    planned_steps: int | None = None
    max_epsilon: float | None = None
    stopped_by_budget: bool = False
    fixed_order_epsilon: float | None = None
    randomness: str | None = None
    grad_mode: str | None = None
    world_size: int | None = None
    unit: str = "one item of the training data set"
    relation: str = "one item added or removed, the rest unchanged"
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    status: str | None = None
    run: str | None = None
    ledger: str | None = None
    ledger_epsilon: float | None = None
    before: tuple[tuple[float, float, int], ...] = ()
    clippings: tuple[tuple[float, float, int, str], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def steps(self) -> int:
        """The number of steps, including those that were lost in crashes."""
        return sum(steps for _, _, steps in self.history)

    @property
    def replace_one(self) -> tuple[float, float] | None:
        """(epsilon, delta) if one item is replaced by another: a removal and an addition, by group privacy.

        Source: Dwork and Roth, The Algorithmic Foundations of Differential Privacy (2014), section 2.3.
        """
        if self.epsilon is None or self.delta is None:
            return None
        return 2 * self.epsilon, min(1.0, (1 + math.exp(min(self.epsilon, 700.0))) * self.delta)

    @property
    def text(self) -> str:
        """The statement as text, with one idea in each line."""
        return text_of(self)

    def to_json(self) -> str:
        """The statement as one JSON object."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyStatement:
        """Read the text of `to_json`.

        Raises:
            ConfigurationError: `text` is not a statement, or has another format.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("format") not in (1, FORMAT):
                raise ValueError("it is of another format")
            known = {field.name for field in dataclasses.fields(cls)}
            return cls(**{name: _as_tuple(value) for name, value in fields.items() if name in known})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(
                f"This is not a privacy statement: {error}. Pass the text that PrivacyStatement.to_json wrote."
            ) from error


def no_guarantee(backend: str) -> PrivacyStatement:
    """The statement of a run without a privacy layer."""
    return PrivacyStatement(
        epsilon=None,
        delta=None,
        overrides=(f"backend {backend!r} has no privacy layer, so no limit of the leakage is known",),
    )


def text_of(statement: PrivacyStatement) -> str:
    """The text of the statement. Its first line gives the guarantee, or says that there is none."""
    if statement.overrides:
        lines = ["NOT PRIVATE: " + "; ".join(statement.overrides) + "."]
    else:
        spent = f"epsilon {round_up(statement.epsilon or 0.0)}, delta {statement.delta:g}"
        lines = [f"The training is ({spent})-differentially private for {statement.unit}."]
    if statement.accountant is not None:
        for name, text in _details(statement):
            ideas = () if isinstance(text, str) else text
            lines += [f"  {name}:" if ideas else f"  {name}: {text}", *(f"    - {idea}" for idea in ideas)]
    return "\n".join(lines)


def _details(s: PrivacyStatement) -> list[tuple[str, str | tuple[str, ...]]]:
    budget = "no budget" if s.max_epsilon is None else f"budget epsilon {s.max_epsilon:g}"
    stopped = ", which the next step would exceed" if s.stopped_by_budget else ""
    parts = "; ".join(f"noise multiplier {sigma:g} and rate {q:.6g} for {n} steps" for sigma, q, n in s.history)
    running = s.status == "running"
    taken = f"at most {s.steps} until the planned end" if running else f"{s.steps} taken"
    found: list[tuple[str, str | tuple[str, ...]]] = [
        *([("Status", "running; figures count all planned steps, so that they hold now and later")] if running else []),
        ("Steps", f"{taken}, {s.planned_steps} planned; {budget}{stopped}"),
        (
            "Mechanism",
            f"Poisson samples of {s.expected_batch_size} in {s.dataset_size} items (a public number) on average, each "
            f"gradient clipped to {_limits(s)}, Gaussian noise: {parts or 'no step yet'}",
        ),
    ]
    accounting: list[tuple[str, str]] = []
    if s.epsilon is not None and s.replace_one is not None:
        replaced, delta = s.replace_one
        error = f", as a rule at most {s.eps_error:g} above the truth" if s.accountant == "prv" else ""
        library = "dp_accounting" if s.accountant == "pld" else "opacus"
        found += [
            ("Neighbours", s.relation),
            ("One item replaced", f"epsilon {round_up(replaced)}, delta {delta:.2g}{', no guarantee' * (delta >= 1)}"),
            ("Covered", s.covered),
        ]
        accounting = [
            ("Accountant", f"{s.accountant} of {library}, an upper bound{error}"),
            ("Batches of a fixed order would give", f"epsilon {round_up(s.fixed_order_epsilon or 0.0)}"),
        ]
    return [
        *found,
        ("Not covered", s.not_covered),
        *s.notes,
        ("Randomness", str(s.randomness)),
        ("Arithmetic", "the guarantee is that of real numbers; noise is drawn and added in floating point"),
        *accounting,
        ("Computed", f"per-sample gradients by {s.grad_mode}, processes: {s.world_size}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in s.versions)),
    ]


def _limits(s: PrivacyStatement) -> str:
    """The norm and the method of the clipping; with numbers of steps if they have changed during the run."""
    clips: dict[str, int] = {}
    for _, _, steps, clip in s.clippings:
        if steps:
            clips[clip or "a norm that is not recorded"] = clips.get(clip or "a norm that is not recorded", 0) + steps
    if len(clips) > 1:
        return ", ".join(f"{clip} for {steps} steps" for clip, steps in clips.items())
    return f"{', '.join(f'{norm:g}' for norm in s.max_grad_norm)} ({s.clipping})"


def round_up(epsilon: float) -> str:
    """`epsilon` with four digits, rounded up."""
    digits = Context(prec=4, rounding=ROUND_CEILING).create_decimal(Decimal(epsilon))
    return f"{digits.normalize():f}"


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
