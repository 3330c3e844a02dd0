"""Evaluating a run's module: every sample of every loader once, whoever asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import SequentialSampler

from trainstack.backends import Communicator
from trainstack.stage import Stage
from trainstack.trainer.collector import as_arguments
from trainstack.trainer.evaluation import Evaluation, eval_mode, evaluation_batches, miscounted, named_loaders
from trainstack.trainer.order import mix
from trainstack.trainer.progress import NoProgress
from trainstack.trainer.reporting import Reporter
from trainstack.trainer.seeding import isolated_rng

if TYPE_CHECKING:
    from trainstack.trainer.run import Run


class Evaluator:
    """Runs the steps of validation, test and prediction, between training steps or by themselves.

    Attributes:
        has_validated: whether a validation that belongs to training has been finished.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._miscounted = set[str]()
        self.has_validated = False

    def val_loaders(self) -> dict[str, Any]:
        """The module's validation loaders by name; empty if it has none."""
        run = self._run
        size = run.args.val_batch_size or run.data.plan.micro_batch
        loaders = run.module.get_val_dataloaders(sampler=SequentialSampler, batch_size=size)
        return named_loaders(loaders, "get_val_dataloaders")

    def validate(self, reporter: Reporter) -> None:
        """A validation within or after an epoch of training; nothing if the module has no data for it."""
        run = self._run
        with isolated_rng(mix(run.state.seed), run.world.device):
            loaders = self.val_loaders()
        if loaders:
            self.evaluate(Stage.VAL, loaders, keep=run.hooks.val_outputs, reporter=reporter)
        self.has_validated = True

    def evaluate(
        self, stage: Stage, loaders: Mapping[str, Any], *, keep: bool, reporter: Reporter | None = None
    ) -> dict[str, Any]:
        """Run the step of `stage` over each loader; returns outputs by loader where `keep` asks for them.

        Modes and random state are afterwards what they were before. With a `reporter` the pass is a part of training:
        it may be broken off, and loaders of an interrupted validation that are done already are left out.

        Raises:
            Stopped: it was broken off.
        """
        run = self._run
        hook = run.hooks.end_val_epoch if stage is Stage.VAL else None
        step, collected, was_busy = run.state.global_step, dict[str, Any](), run.busy
        run.busy = True
        seed = mix(run.state.seed, stage.value, step, run.world.rank)
        done = 0 if reporter is None else run.state.loaders_done
        for key, loader in islice(loaders.items(), done, None):
            with isolated_rng(seed, run.world.device), eval_mode(run.module):
                outputs = self._evaluate(stage, key, loader, keep, reporter)
                if keep:
                    collected[key] = outputs
                if hook is not None:
                    hook(step, *(as_arguments(outputs) if keep and run.hooks.val_outputs else ()), key=key)
            if reporter is not None:
                run.state.finish_loader()
        run.busy = was_busy
        return collected

    def _evaluate(self, stage: Stage, key: str, loader: Any, keep: bool, reporter: Reporter | None) -> Any:
        """Evaluate one loader on all processes; what they collected, joined, if it is to be kept."""
        run = self._run
        world = run.world
        evaluation = Evaluation(run.stack, run.loop.work, stage, run.state.global_step, keep_outputs=keep)
        batches, in_parts = evaluation_batches(
            loader,
            seed=run.state.seed,
            world=world,
            limit=run.args.max_val_steps_per_epoch,
        )
        progress = NoProgress() if reporter is None else reporter.progress
        progress.start_validation(key, None)
        evaluation.run(batches, progress, None if reporter is None else run.stopper.interrupts)
        progress.end_validation()
        comm = world.comm if in_parts else Communicator()
        told = world.comm.gather((evaluation.batches, evaluation.samples, evaluation.broken_off))
        if any(broken_off for *_, broken_off in told):
            run.stopper.settle()
        if not sum(batches for batches, *_ in told):
            run.log.warning(f"the {stage.name.lower()} loader {key!r} gave no batch at all.")
        elif run.args.max_val_steps_per_epoch is None:
            counts = [samples for _, samples, _ in told] if in_parts else [evaluation.samples]
            self._say_miscounted(f"{stage.name.lower()} loader {key!r}", miscounted(loader, counts))
        self._record_loss(stage, key, evaluation.mean_loss(comm))
        if evaluation.outputs is None:
            return None
        outputs = evaluation.outputs.all_outputs
        return run.stack.gather(outputs) if in_parts else outputs

    def _say_miscounted(self, which: str, what: str | None) -> None:
        run = self._run
        if what is not None and which not in self._miscounted:
            self._miscounted.add(which)
            run.log.warning(f"{which}: {what}")

    def _record_loss(self, stage: Stage, key: str, loss: float | None) -> None:
        run = self._run
        if loss is not None:
            name = stage.name.lower() if key == "default" else f"{stage.name.lower()}/{key}"
            step, epoch = run.state.global_step, run.state.epoch
            run.history.update_metric(f"{name}/loss", loss, step=step, epoch=epoch)
