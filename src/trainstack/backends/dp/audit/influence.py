"""The neighbour probe on a module of the user's and the user's own data: can a record move more than it may?"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.dp.audit.findings import Finding
from trainstack.backends.dp.audit.report import AuditReport
from trainstack.backends.dp.audit.subject import check_private


def audit_module(module: Any, args: Any, *, rounds: int = 5) -> AuditReport:
    """Make a module ready for private training several times, and collect what speaks against it.

    Each time, some of its records are drawn and left out one by one, and the sum of clipped gradients must not change
    by more than the clipping norm. A private run does this once before it trains; here it is done for other records
    each time. The module is not trained, and nothing is written.

    Args:
        module: a `ModuleInterface`, as for a `Trainer`.
        args: the `TrainerArguments`, with a private backend and `differential_privacy_args`.
        rounds: how often.

    Raises:
        PrivacyError: a private run with this module would be refused whatever the records.
        ConfigurationError: the backend is not private.
    """
    check_private(args.backend)
    problems = [problem for _ in range(rounds) for problem in _problems(module, args)]
    finding = Finding(
        probe="neighbours",
        claim="a record moves the clipped sum by the clipping norm at most",
        seen=f"{rounds} batches, {len(problems)} problems" + (f": {problems[0]}" if problems else ""),
        p_value=float(not problems),
    )
    return AuditReport(subject=f"{type(module).__name__} on {args.backend}", findings=(finding,))


def _problems(module: Any, args: Any) -> tuple[str, ...]:
    from trainstack.trainer import Trainer

    private: DifferentialPrivacyArguments | None = args.differential_privacy_args
    with tempfile.TemporaryDirectory() as folder:
        reporting = replace(
            args,
            output_dir=folder,
            resume=False,
            writers=(),
            differential_privacy_args=private and replace(private, on_unsafe="report", debug_seed=None),
        )
        trainer = Trainer(module, reporting)
        try:
            return trainer.privacy_statement().overrides
        finally:
            trainer.close()
