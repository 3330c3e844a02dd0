"""`audit`: all experiments on one set of privacy settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainstack.backends.build import build_trainer_backend
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.dp.audit.coins import canary_audit
from trainstack.backends.dp.audit.noise import noise_probe
from trainstack.backends.dp.audit.report import AuditReport
from trainstack.backends.dp.audit.sampling import sampling_probe
from trainstack.backends.dp.audit.subject import Subject
from trainstack.errors import ConfigurationError

LEVELS = {"quick": 5, "full": 25}
"""Runs of canaries that are pooled; `"full"` also makes the runs of the probes five times as long."""


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
    if level not in LEVELS:
        raise ConfigurationError(f"level={level!r}: write 'quick' or 'full'.")
    if args.noise_multiplier == 0:
        raise ConfigurationError("noise_multiplier=0 promises nothing, so there is nothing to audit. Write more.")
    subject = Subject(args=args, backend=backend, **numbers)
    longer = replace(subject, epochs=5 * subject.epochs) if level == "full" else subject
    together = build_trainer_backend(backend)
    together.open(subject.device)  # one process group for all runs
    try:
        findings = [*noise_probe(longer), *sampling_probe(longer)]
        bounds = canary_audit(subject, LEVELS[level])
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
