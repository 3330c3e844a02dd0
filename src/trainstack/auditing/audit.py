"""`audit` runs every experiment on one set of privacy settings, `audit_module` on a user's module."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

from trainstack.auditing.canaries import AuditedRun, check_private
from trainstack.auditing.canary_bounds import canary_audit
from trainstack.auditing.mechanism_probes import noise_probe, sampling_probe
from trainstack.auditing.report import AuditReport, Finding
from trainstack.backends.build import build_trainer_backend
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.errors import ConfigurationError


def audit(
    args: DifferentialPrivacyArguments, backend: str = "sp-dp", *, level: str = "quick", **numbers: Any
) -> AuditReport:
    """Try to show that private training under these settings is less private than it states.

    Everything runs through the real `Trainer` and its layers, on a small model of canaries. Over several processes all
    of them call it.

    Args:
        args: the privacy settings.
        backend: the backend string, with `dp` in it.
        level: `"quick"` takes a second or so, `"full"` some three times as long.
        **numbers: `train_batch_size`, `dataset_size`, `epochs`, `gpu_batch_size_limit` and `device` of the runs that
            are made. The defaults (500, 2000, 2) make eight steps in which canaries are easy to tell.

    Raises:
        ConfigurationError: a number is out of its range, or the settings promise nothing.
    """
    if level not in ("quick", "full"):
        raise ConfigurationError(f"level={level!r}: write 'quick' or 'full'.")
    if args.noise_multiplier == 0:
        raise ConfigurationError("noise_multiplier=0 promises nothing, so there is nothing to audit. Write more.")
    subject = AuditedRun(args=args, backend=backend, **numbers)
    longer = replace(subject, epochs=5 * subject.epochs) if level == "full" else subject
    together = build_trainer_backend(backend)
    together.open(subject.device)  # one process group for all runs
    try:
        findings = [*noise_probe(longer), *sampling_probe(longer)]
        bounds = canary_audit(subject, 25 if level == "full" else 5)
    finally:
        together.close()
    return AuditReport(
        subject=subject.text,
        findings=(*findings, *bounds.findings),
        epsilon_claimed=bounds.claimed,
        delta=args.delta,
        epsilon_at_least=bounds.one_run,
        epsilon_at_least_tradeoff=bounds.tradeoff,
    )


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
    return AuditReport(subject=f"{type(module).__name__} on {args.resolved_backend}", findings=(finding,))


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
