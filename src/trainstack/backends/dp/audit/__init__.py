"""Audits of private training: experiments that would show if it did not keep its promise.

`audit` runs all of them on a set of privacy settings, on the canaries of `canary.py`: `noise.py` and `sampling.py` test
what every step is made of, `coins.py` tells canaries from the updates and bounds epsilon by what it gets right, with
the formulas of `one_run.py` and, sharper, of `tradeoff.py` over `profile.py`. `audit_module` in `influence.py` tests a
module of the user's on the user's data. `report.py` tells.

Importing this package imports scipy, of the extra `trainstack[dp]`.
"""

from trainstack.backends.dp.opacus_import import import_opacus

import_opacus("scipy", "An audit")

from trainstack.backends.dp.audit.auditing import audit  # noqa: E402
from trainstack.backends.dp.audit.findings import Finding  # noqa: E402
from trainstack.backends.dp.audit.influence import audit_module  # noqa: E402
from trainstack.backends.dp.audit.report import AuditReport  # noqa: E402

__all__ = ["AuditReport", "Finding", "audit", "audit_module"]
