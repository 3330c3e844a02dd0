"""PyMarlin's nested arguments that are still of use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsArguments:
    """PyMarlin's place for `log_steps`; the same as `TrainerArguments.log_every`, and wins over it."""

    log_steps: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterArguments:
    """PyMarlin's place for `tb_log_dir`: where writers write, instead of `TrainerArguments.output_dir`."""

    tb_log_dir: str | None = None
