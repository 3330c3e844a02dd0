"""What a trainer does beside training: validation, test and prediction, each by itself."""

from __future__ import annotations

from typing import Any

from trainstack.backends import TrainerBackend
from trainstack.stage import Stage
from trainstack.trainer.evaluated import EvaluationOutputs
from trainstack.trainer.evaluation import named_loaders
from trainstack.trainer.properties import TrainerProperties
from trainstack.trainer.pushing import push
from trainstack.trainer.together import by_all
from trainstack.trainer.view import RunView


class EvaluatingTrainer(TrainerProperties):
    """Evaluates a module that is made ready when it is first needed."""

    trainer_backend: TrainerBackend

    @property
    def view(self) -> RunView:
        """Counters, sizes and loaders of the run, to be read."""
        return RunView(self._ready())

    @by_all
    def validate(
        self, dataloaders: Any = None, *, log: bool | None = None, keep_outputs: bool = True
    ) -> EvaluationOutputs:
        """Run `val_step` over validation data and call `on_end_val_epoch`. Callbacks may call it in any hook.

        Args:
            dataloaders: a loader, or a dict of them by name; the module's by default. The loss of the loader "shifted"
                is called `val/shifted/loss`, that of a single loader `val/loss`.
            log: whether metrics go to the history; by default only within training, from a hook.
            keep_outputs: whether outputs are returned; if False they are collected only where `on_end_val_epoch` takes
                them, which saves memory.

        Returns:
            The outputs by loader; their attribute `metrics` has losses and metrics by name.
        """
        run = self._ready()
        outputs = run.evaluator.by_itself(Stage.VAL, dataloaders, log, keep_outputs)
        if run.save_asked and not run.busy:
            run.save_asked = False
            self._saver.save(run, force=True)
        return outputs

    @by_all
    def test(self, dataloaders: Any = None, *, log: bool | None = None) -> EvaluationOutputs:
        """Run `test_step` over test data, as `validate` does.

        Raises:
            ModuleContractError: there is no data.
        """
        return self._ready().evaluator.by_itself(Stage.TEST, dataloaders, log)

    @by_all
    def predict(self, dataloader: Any) -> Any:
        """Run `predict_step` over `dataloader`; returns what it returned, joined in data set order.

        A dict of loaders gives a dict of outputs.
        """
        run = self._ready()
        outputs = run.evaluator.evaluate(Stage.PREDICT, named_loaders(dataloader, "the caller of predict"), keep=True)
        return outputs if isinstance(dataloader, dict) else outputs["default"]

    @by_all
    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload a model trained with trainstack",
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Export the module's state and upload that; arguments and errors are those of the function `push_to_hub`.

        Returns:
            The URL of the commit.
        """
        self._ready()
        options = {"commit_message": commit_message, "private": private, "revision": revision}
        return push(self._saver, repo_id, {**options, "token": token, "endpoint": endpoint})

    @by_all
    def gather(self, outputs: Any) -> Any:
        """What every process gives, joined along dimension 0 in the order of the ranks, on every process.

        Tensors may differ in their first dimension; lists are put one after the other; dicts and tuples are joined
        item by item. All processes must call it together.
        """
        self._ready()
        return self.trainer_backend.gather(outputs)
