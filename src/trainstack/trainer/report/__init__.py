"""The run report: what a run was and did, on one page that is written when it ends."""

from __future__ import annotations

from trainstack.trainer.report.facts import replace_file
from trainstack.trainer.report.page import REPORT_NAME, page_of
from trainstack.trainer.report.recorder import RunRecorder
from trainstack.trainer.report.run_on_disk import ReportedRun, read_run
from trainstack.trainer.report.starting import begin_recording

__all__ = ["REPORT_NAME", "ReportedRun", "RunRecorder", "begin_recording", "page_of", "read_run", "replace_file"]
