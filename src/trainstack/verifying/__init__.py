"""`verify_resume` proves that a run survives being killed."""

from trainstack.verifying.comparison import Divergence
from trainstack.verifying.report import KillEvent, ResumeReport
from trainstack.verifying.verify import verify_resume

__all__ = ["KillEvent", "Divergence", "ResumeReport", "verify_resume"]
