"""A privacy statement in words."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context, Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainstack.backends.dp.statement import PrivacyStatement

ARITHMETIC = "the guarantee is that of real numbers; noise is drawn and added in floating point"


def text_of(statement: PrivacyStatement) -> str:
    """Return the statement's lines, the first of which says what holds, or that nothing does."""
    lines = [_headline(statement)]
    if statement.accountant is not None:
        lines += [f"  {name}: {text}" for name, text in _details(statement)]
    return "\n".join(lines)


def _headline(statement: PrivacyStatement) -> str:
    if statement.overrides:
        return "NOT PRIVATE: " + "; ".join(statement.overrides) + "."
    return (
        f"The training is (epsilon {rounded_up(statement.epsilon or 0.0)}, delta {statement.delta:g})-differentially "
        f"private for {statement.unit}."
    )


def _details(s: PrivacyStatement) -> list[tuple[str, str]]:
    found = [("Steps", _steps(s)), ("Mechanism", _mechanism(s))]
    if s.epsilon is not None and s.replace_one is not None:
        replaced, delta = s.replace_one
        error = f", as a rule at most {s.eps_error:g} above the truth" if s.accountant == "prv" else ""
        found += [
            ("Accountant", f"{s.accountant} of opacus, an upper bound{error}"),
            ("Neighbours", s.relation),
            ("One item replaced", f"epsilon {rounded_up(replaced)}, delta {delta:.2g}"),
            ("Batches of a fixed order would give", f"epsilon {rounded_up(s.fixed_order_epsilon or 0.0)}"),
            ("Covered", "; ".join(s.covered)),
        ]
    found += [
        ("Not covered", "; ".join(s.not_covered)),
        ("Randomness", str(s.randomness)),
        ("Arithmetic", ARITHMETIC),
        ("Computed", f"per-sample gradients by {s.grad_mode}, processes: {s.world_size}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in s.versions)),
    ]
    return found


def _steps(s: PrivacyStatement) -> str:
    budget = "no budget" if s.max_epsilon is None else f"budget epsilon {s.max_epsilon:g}"
    stopped = ", which the next step would exceed" if s.stopped_by_budget else ""
    return f"{s.steps} taken, {s.planned_steps} planned; {budget}{stopped}"


def _mechanism(s: PrivacyStatement) -> str:
    parts = "; ".join(f"noise multiplier {sigma:g} and rate {q:.6g} for {n} steps" for sigma, q, n in s.history)
    norms = ", ".join(f"{norm:g}" for norm in s.max_grad_norm)
    return (
        f"Poisson samples of {s.expected_batch_size} in {s.dataset_size} items (a public number) on average, each "
        f"gradient clipped to {norms} ({s.clipping}), Gaussian noise: {parts or 'no step yet'}"
    )


def rounded_up(epsilon: float) -> str:
    """`epsilon` with four digits, never below it."""
    digits = Context(prec=4, rounding=ROUND_CEILING).create_decimal(Decimal(epsilon))
    return f"{digits.normalize():f}"
