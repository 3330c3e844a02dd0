"""A loop driver for `TrainerBackend.train_dl`, without a `Trainer`."""

from __future__ import annotations

from itertools import islice
from typing import Any

from trainstack.backends import Clipping, TrainerBackend, TrainerBackendArguments, Workload
from trainstack.stage import Stage
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.random_state import isolated_rng
from trainstack.trainer.core.state import RunState
from trainstack.trainer.data.presharded import PreshardedSource
from trainstack.trainer.data.sample_counts import SampleCounter
from trainstack.trainer.data.step_batches import custom_batch_weight, sum_steps, sums_losses
from trainstack.trainer.evaluation.loader_pass import LoaderPass, eval_mode, evaluation_pass
from trainstack.trainer.events.hooks import Hooks
from trainstack.trainer.run.loop import train_steps
from trainstack.trainer.run.train_loop import TrainLoop
from trainstack.trainer.schedulers.stepping import Schedules
from trainstack.trainer.tracking.progress import NoProgress

_FLUSH_EVERY = 1000
"""Global steps between two reads of the losses, as `due_work.MOST_PENDING_STEPS`."""


class DataLoaderRunner:
    """Runs the loop over given dataloaders. It has no data order, checkpoints or logs; the trainer adds these."""

    def __init__(self, stack: TrainerBackend, args: TrainerBackendArguments) -> None:
        self._stack, self._args, self._state = stack, args, RunState()
        limit = args.max_grad_norm if args.clip_grads else 0.0
        clipping = Clipping(kind="norm" if args.clip_grads else "none", limit=limit)
        world = stack.open(args.device)
        stack.place(args.model, world)
        self._work = stack.prepare(Workload.from_module(args.model, args.optimizers, world, clipping))
        self._schedules = Schedules(tuple(args.schedulers or ()))

    @property
    def global_steps(self) -> int:
        """Global steps finished."""
        return self._state.global_step

    @property
    def batches(self) -> int:
        """Micro-batches finished."""
        return self._state.batches

    def train(self, dataloader: Any, callback: Any) -> Any:
        """One pass over `dataloader`; returns the collected outputs, and raises on a non-finite loss at the end."""
        weigh = custom_batch_weight(self._args.model) or SampleCounter(dataloader, RunLogger().warning)
        source = PreshardedSource(dataloader, self._args.gradient_accumulation, weigh, self._work.world.comm)
        loop = TrainLoop(
            self._stack,
            self._work,
            Hooks(callback),
            schedules=self._schedules,
            state=self._state,
            keep_epoch_outputs=True,
        )

        def flush() -> None:
            loop.meter.flush()
            loop.next_due_step = self._state.global_step + _FLUSH_EVERY

        loop.on_due, loop.next_due_step = flush, self._state.global_step + _FLUSH_EVERY
        with self._work.world.comm.fail_together(lambda: f"global step {self._state.current_step}"):
            steps = source.iter_steps()
            steps = sum_steps(steps) if sums_losses(self._args.model) else steps
            train_steps(loop, islice(steps, self._args.max_train_steps_per_epoch))
            loop.meter.flush()
        self._state.finish_epoch()
        assert loop.epoch_outputs is not None
        return loop.epoch_outputs.all_outputs

    def validate(self, dataloader: Any) -> Any:
        """One pass over `dataloader`; returns the collected outputs."""
        evaluation = LoaderPass(self._stack, self._work, Stage.VAL, self._state.global_step, loader=dataloader)
        seed = mix(0, Stage.VAL.value, self._state.global_step)
        device, module = self._work.world.device, self._work.module
        with evaluation_pass(self._stack, self._work), isolated_rng(seed, device), eval_mode(module):
            evaluation.run(
                ((batch, None) for batch in islice(iter(dataloader), self._args.max_val_steps_per_epoch)), NoProgress()
            )
        assert evaluation.outputs is not None
        return evaluation.outputs.all_outputs
