"""`watch_steps` trains a few steps and finds obstacles to equal bits; `measure_cost` measures a remedy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainstack.trainer import Callback, ModuleInterface, Trainer, TrainerArguments, seed_everything
from trainstack.verifying.determinism.operators import Operator, OperatorWatch
from trainstack.verifying.determinism.step_trace import steps_alone
from trainstack.verifying.determinism.user_sources import Source, SourceWatch

MakeModule = Callable[[], ModuleInterface]
_ROUNDS = 3  # the least of three excludes most disturbances by other processes


def watch_steps(
    make_module: MakeModule, args: TrainerArguments, steps: int
) -> tuple[Sequence[Source], Sequence[Operator]]:
    """The values without a seed that user code gets, and the operators of the steps that may not be deterministic.

    Nothing is compiled, so that each operator is seen. The construction of the module is observed too.
    """
    sources = SourceWatch()
    seed_everything(args.seed)
    with sources:
        module = make_module()
    alone = replace(steps_alone(args, steps), deterministic="warn", compile=False)
    trainer = Trainer(module, alone)
    with OperatorWatch() as operators, sources:
        trainer.train()
    return list(sources.found), list(operators.found.values())


class _Timer(Callback):
    """The CPU time of each step, in seconds."""

    expects_all_events = False

    def __init__(self) -> None:
        self.times: list[float] = []
        self._begin = 0.0

    def on_fetch_data_end(self, trainer: object, batch: object) -> None:
        self._begin = time.process_time()

    def on_train_step_end(self, trainer: object, step: int) -> None:
        self.times.append(time.process_time() - self._begin)


def measure_cost(make_module: MakeModule, args: TrainerArguments, steps: int) -> float:
    """The CPU time of a step with deterministic operations, divided by that without: the least of several rounds.

    An accelerator works in parallel to the CPU, so there the ratio does not show its time.
    """
    least = {False: float("inf"), True: float("inf")}
    for _ in range(_ROUNDS):
        for is_on in least:
            timer = _Timer()
            seed_everything(args.seed)
            # "warn", because operators without a deterministic version must not end the measurement
            alone = replace(steps_alone(args, steps), deterministic="warn" if is_on else False)
            Trainer(make_module(), alone, callbacks=[timer]).train()
            least[is_on] = min(least[is_on], *timer.times)
    return least[True] / least[False]
