"""`verify_resume` tests that killed and resumed runs have the same bits as an uninterrupted run."""

from trainstack.verifying.comparison import Divergence
from trainstack.verifying.report import KillEvent, ResumeReport
from trainstack.verifying.verify import verify_resume

__all__ = ["KillEvent", "Divergence", "ResumeReport", "verify_resume"]
