"""Audits of private training: experiments that fail if a run leaks more than its stated epsilon.

`audit` tests the library's mechanism on canaries. `audit_module` tests a user's module on the user's data. Importing
this package imports scipy, of the extra `trainstack[dp]`.
"""

from trainstack.backends.dp.epsilon import import_opacus

import_opacus("scipy", "An audit")

from trainstack.auditing.audit import audit  # noqa: E402 - only after scipy was found
from trainstack.auditing.module_audit import audit_module  # noqa: E402
from trainstack.auditing.report import AuditReport, Finding  # noqa: E402

__all__ = ["AuditReport", "Finding", "audit", "audit_module"]
