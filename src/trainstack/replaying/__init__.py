"""`replay` repeats recorded steps of a run and compares every bit; `follow` does so while the run trains.

`compare_by_replay` replays two runs and finds the exact step at which they diverge.
"""

from trainstack.replaying.bisection import compare_by_replay
from trainstack.replaying.following import follow
from trainstack.replaying.replays import replay
from trainstack.replaying.report import ReplayReport, StepDifference

__all__ = ["ReplayReport", "StepDifference", "compare_by_replay", "follow", "replay"]
