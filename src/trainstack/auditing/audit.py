"""`audit` runs every experiment on one set of privacy settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainstack.auditing.canaries import AuditedRun
from trainstack.auditing.canary_bounds import canary_audit
from trainstack.auditing.mechanism_probes import count_probe, noise_probe, sampling_probe
from trainstack.auditing.report import AuditReport
from trainstack.backends.build import build_trainer_backend
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.errors import ConfigurationError


def audit(
    args: DifferentialPrivacyArguments, backend: str = "sp-dp", *, level: str = "quick", **numbers: Any
) -> AuditReport:
    """Try to show that private training with these settings is less private than it states.

    Everything runs through the real `Trainer` and its layers, on a small model of canaries. All processes of a run call
    it together.

    Args:
        args: the privacy settings.
        backend: the backend string, with `dp` in it.
        level: `"quick"` takes about a second, `"full"` about three times as long.
        **numbers: `train_batch_size`, `dataset_size`, `epochs`, `gpu_batch_size_limit` and `device` of the runs. The
            defaults (500, 2000, 2) make eight steps in which canaries are easy to distinguish.

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
        findings = [*noise_probe(longer), *count_probe(longer), *sampling_probe(longer)]
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
