"""A ready-made module of a model, a loss and data sets, and what it is made of."""

from typing import TYPE_CHECKING

from trainstack.lazily import lazily
from trainstack.trainer.supervised.mapping import apply_mapping
from trainstack.trainer.supervised.matching import call_with_matching_args

if TYPE_CHECKING:
    from trainstack.trainer.supervised.module import SupervisedModule
    from trainstack.trainer.supervised.optimizers import build_optimizer

__getattr__ = lazily(
    __name__,
    {
        "SupervisedModule": "trainstack.trainer.supervised.module",
        "build_optimizer": "trainstack.trainer.supervised.optimizers",
    },
)

__all__ = ["SupervisedModule", "apply_mapping", "build_optimizer", "call_with_matching_args"]
