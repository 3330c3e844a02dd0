"""`global_stats`, to which a script gives metrics from anywhere."""

from trainstack.compat.pymarlin.utils.stats.basic_stats import BasicStats, StatInitArguments, global_stats

__all__ = ["BasicStats", "StatInitArguments", "global_stats"]
