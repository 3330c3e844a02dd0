"""Proof that a run survives being killed: the user's own training, killed at random moments, resumed, compared."""

from trainstack.verifying.report import Kill, ResumeReport
from trainstack.verifying.verify import verify_resume

__all__ = ["Kill", "ResumeReport", "verify_resume"]
