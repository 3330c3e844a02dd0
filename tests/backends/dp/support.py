"""Helpers that the tests of the accounts share."""

from __future__ import annotations

from typing import Any

from trainstack.backends.dp import Accountant, DifferentialPrivacyArguments, PrivacyPlan, SpendLedger, plan_privacy


def make_plan(
    *, batch: int = 4, records: int = 200, steps: int = 100, **given: Any
) -> tuple[PrivacyPlan, DifferentialPrivacyArguments]:
    args = DifferentialPrivacyArguments(**{"delta": 1e-5, "accountant": "rdp", **given})
    return plan_privacy(args, expected_batch_size=batch, dataset_size=records, steps=steps), args


def make_accountant(ledger: SpendLedger | None = None, **given: Any) -> Accountant:
    plan, args = make_plan(**{"noise_multiplier": 1.0, **given})
    return Accountant(plan, args, ledger)
