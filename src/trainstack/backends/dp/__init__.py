"""`dp`: differentially private training with a stated epsilon.

`layer.py` is the layer of the stack, `setup.py` its preparation: checks, plan, gradient mode, mechanism. Of each step,
`sampling.py` draws the records, `modes` sums their clipped gradients, `randomness.py` draws the noise. `budget.py`
charges the step before that, over `accounting.py` and `ledger.py`, whose lines `ledger_chain.py` keeps in a store of
`ledger_store.py`.

Most runs are not private, so importing this package imports no other file of it. opacus and scipy are imported when an
epsilon is computed.
"""

from typing import TYPE_CHECKING

from trainstack._lazy import lazy_imports

if TYPE_CHECKING:
    from trainstack.backends.dp.accounting import calibrate_noise, delta_of, epsilon_of, steps_within
    from trainstack.backends.dp.arguments import DifferentialPrivacyArguments, PrivacyPlan, plan_privacy
    from trainstack.backends.dp.budget import Accountant
    from trainstack.backends.dp.epsilon import fixed_order_epsilon, gaussian_epsilon, shuffled_epsilon_at_least
    from trainstack.backends.dp.ledger import SharedUse, SpendLedger
    from trainstack.backends.dp.ledger_store import LedgerStore, OpenLedger, register_ledger_store
    from trainstack.backends.dp.selection import best_of_epsilon
    from trainstack.backends.dp.statement import private_statement
    from trainstack.backends.privacy_statement import PrivacyStatement, no_guarantee

__getattr__ = lazy_imports(
    __name__,
    {
        name: f"trainstack.backends.{module}"
        for module, names in {
            "dp.accounting": ("calibrate_noise", "delta_of", "epsilon_of", "steps_within"),
            "dp.arguments": ("DifferentialPrivacyArguments", "PrivacyPlan", "plan_privacy"),
            "dp.budget": ("Accountant",),
            "dp.epsilon": ("fixed_order_epsilon", "gaussian_epsilon", "shuffled_epsilon_at_least"),
            "dp.ledger": ("SharedUse", "SpendLedger"),
            "dp.ledger_store": ("LedgerStore", "OpenLedger", "register_ledger_store"),
            "dp.selection": ("best_of_epsilon",),
            "dp.statement": ("private_statement",),
            "privacy_statement": ("PrivacyStatement", "no_guarantee"),
        }.items()
        for name in names
    },
)

__all__ = [
    "Accountant",
    "DifferentialPrivacyArguments",
    "LedgerStore",
    "OpenLedger",
    "PrivacyPlan",
    "PrivacyStatement",
    "SharedUse",
    "SpendLedger",
    "best_of_epsilon",
    "calibrate_noise",
    "delta_of",
    "epsilon_of",
    "fixed_order_epsilon",
    "gaussian_epsilon",
    "no_guarantee",
    "plan_privacy",
    "private_statement",
    "register_ledger_store",
    "shuffled_epsilon_at_least",
    "steps_within",
]
