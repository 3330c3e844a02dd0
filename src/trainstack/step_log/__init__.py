"""The step log of a run: digests and values of each global step, on each rank."""

from trainstack.step_log.checkpoint_heads import contradicting_checkpoints
from trainstack.step_log.format import ABSENT, ENTRY, CheckpointNote, Details, End, Flag, Start
from trainstack.step_log.reading import StepLog, log_path, ranks_of, read_step_log

__all__ = [
    "ABSENT",
    "ENTRY",
    "CheckpointNote",
    "Details",
    "End",
    "Flag",
    "Start",
    "StepLog",
    "contradicting_checkpoints",
    "log_path",
    "ranks_of",
    "read_step_log",
]
