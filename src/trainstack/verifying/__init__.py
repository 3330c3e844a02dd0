"""`verify_resume` proves that a run survives being killed."""

from trainstack.verifying.comparing import Parting
from trainstack.verifying.report import Kill, ResumeReport
from trainstack.verifying.verify import verify_resume

__all__ = ["Kill", "Parting", "ResumeReport", "verify_resume"]
