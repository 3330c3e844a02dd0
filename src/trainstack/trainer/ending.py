"""How a training ends that no exception has ended: the last checkpoint, who is told, and the export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainstack.trainer.events import Event
from trainstack.trainer.reporting import Reporter
from trainstack.trainer.run import Run

if TYPE_CHECKING:
    from trainstack.trainer.trainer import Trainer


def end_training(trainer: Trainer, run: Run, reporter: Reporter) -> None:
    """Save, tell the subscribers, and export the module unless a signal has interrupted the run."""
    saver, agreed, step = trainer._saver, trainer._stopper.agreed, run.state.global_step
    run.restore_rng_once()
    reporter.write()  # a history counts as written once it is saved
    saver.save(run, force=True, unless_saved=True)
    saver.finish()
    if agreed is not None:
        run.events.fire(Event.STOP_TRAINING, agreed.reason)
        if agreed.signal is not None:
            run.events.end_train("interrupted")
            reporter.end(trainer, "interrupted", agreed.reason)
            return
        reporter.text(f"stopped after global step {step}: {agreed.reason}")
    run.events.end_train("finished" if agreed is None else "stopped")
    trainer.save_model_checkpoint()
    if run.hooks.end_train is not None:
        run.hooks.end_train(step)
    reporter.write()
    reporter.end_private_run(trainer.trainer_backend, run.why_over)
    reporter.end(trainer, "finished" if agreed is None else "stopped", agreed.reason if agreed else run.why_over)
