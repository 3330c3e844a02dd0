"""The HTML report of a run, written when the run ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainstack._lazy import lazy_imports

if TYPE_CHECKING:
    from trainstack.trainer.reporting.report.facts import REPORT_NAME, replace_file
    from trainstack.trainer.reporting.report.page import page_of
    from trainstack.trainer.reporting.report.runs import ReportedRun, read_run

__getattr__ = lazy_imports(  # a run that begins needs none of these, and imports the modules beside them
    __name__,
    {
        "REPORT_NAME": "trainstack.trainer.reporting.report.facts",
        "ReportedRun": "trainstack.trainer.reporting.report.runs",
        "page_of": "trainstack.trainer.reporting.report.page",
        "read_run": "trainstack.trainer.reporting.report.runs",
        "replace_file": "trainstack.trainer.reporting.report.facts",
    },
)

__all__ = ["REPORT_NAME", "ReportedRun", "page_of", "read_run", "replace_file"]
