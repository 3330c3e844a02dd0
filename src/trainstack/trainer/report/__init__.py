"""The run report: what a run was and did, on one page that is written when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainstack.lazily import lazily

if TYPE_CHECKING:
    from trainstack.trainer.report.facts import REPORT_NAME, replace_file
    from trainstack.trainer.report.page import page_of
    from trainstack.trainer.report.run_on_disk import ReportedRun, read_run

__getattr__ = lazily(  # a run that begins needs none of these, and imports the modules beside them
    __name__,
    {
        "REPORT_NAME": "trainstack.trainer.report.facts",
        "ReportedRun": "trainstack.trainer.report.run_on_disk",
        "page_of": "trainstack.trainer.report.page",
        "read_run": "trainstack.trainer.report.run_on_disk",
        "replace_file": "trainstack.trainer.report.facts",
    },
)

__all__ = ["REPORT_NAME", "ReportedRun", "page_of", "read_run", "replace_file"]
