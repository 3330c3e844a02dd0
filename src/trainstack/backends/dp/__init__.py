"""`dp`: differentially private training with a stated epsilon.

`layer.py` is the layer of the stack. `preparing.py` refuses what is unsafe (`refusals.py`), tries the module out
(`probes.py`) and builds the `mechanism.py` of a run: `poisson.py` draws its records, `modes/` gives the sum of their
gradients, clipped by `clipping.py`, and `randomness.py` the noise.

`arguments.py` is what a user writes and `plan.py` the constants that follow from it; `accounting.py` turns steps into
epsilon, with opacus behind `accountants.py` and without any package in `gaussian.py`; `budget.py` counts the steps of a
run and refuses those beyond its budget; `ledger.py` keeps the count on disk over crashes; `statement.py` says what
holds.

Importing this package imports next to nothing, since most runs are not private; opacus and scipy are imported by
`opacus_import.py`, when a number is asked for.
"""

from typing import TYPE_CHECKING

from trainstack._lazy import lazily

if TYPE_CHECKING:
    from trainstack.backends.dp.accounting import calibrate_noise, delta_of, epsilon_of, steps_within
    from trainstack.backends.dp.arguments import DifferentialPrivacyArguments, PrivacyPlan, plan_privacy
    from trainstack.backends.dp.budget import Accountant
    from trainstack.backends.dp.epsilon import fixed_order_epsilon, gaussian_epsilon, shuffled_epsilon_at_least
    from trainstack.backends.dp.ledger import SpendLedger
    from trainstack.backends.dp.statement import PrivacyStatement, no_guarantee, private_statement

__getattr__ = lazily(
    __name__,
    {
        name: f"trainstack.backends.dp.{place}"
        for place, names in {
            "accounting": ("calibrate_noise", "delta_of", "epsilon_of", "steps_within"),
            "arguments": ("DifferentialPrivacyArguments",),
            "budget": ("Accountant",),
            "gaussian": ("fixed_order_epsilon", "gaussian_epsilon", "shuffled_epsilon_at_least"),
            "ledger": ("SpendLedger",),
            "plan": ("PrivacyPlan", "plan_privacy"),
            "statement": ("PrivacyStatement", "no_guarantee", "private_statement"),
        }.items()
        for name in names
    },
)

__all__ = [
    "Accountant",
    "DifferentialPrivacyArguments",
    "PrivacyPlan",
    "PrivacyStatement",
    "SpendLedger",
    "calibrate_noise",
    "delta_of",
    "epsilon_of",
    "fixed_order_epsilon",
    "gaussian_epsilon",
    "no_guarantee",
    "plan_privacy",
    "private_statement",
    "shuffled_epsilon_at_least",
    "steps_within",
]
