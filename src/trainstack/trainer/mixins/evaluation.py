"""The methods of a trainer that evaluate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainstack.errors import ConfigurationError
from trainstack.stage import Stage
from trainstack.trainer.evaluation.evaluator import Kept, check_kept
from trainstack.trainer.mixins.base import TrainerBase

if TYPE_CHECKING:
    from trainstack.trainer.evaluation.evaluator import EvaluationOutputs


class EvaluationMixin(TrainerBase):
    """Validates, tests, predicts and gathers."""

    def validate(
        self,
        dataloaders: Any = None,
        *,
        log: bool | None = None,
        keep_outputs: Kept = True,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pad_value: float | None = None,
    ) -> EvaluationOutputs:
        """Run `val_step` over validation data and call `on_end_val_epoch`. Callbacks may call it in any hook.

        Before training it needs neither training data nor optimizers, except with a layer that prepares both together,
        such as `dp`. The weights are then those of `resume` or `init_weights_from`, or the module's own.

        Args:
            dataloaders: a loader, a data set with a length, or a dict of them by name; the module's by default. The
                loss of the loader "shifted" is called `val/shifted/loss`, that of a single loader `val/loss`.
            log: whether metrics go to the history; by default only within training, from a hook.
            keep_outputs: whether outputs are returned; if False they are collected only where `on_end_val_epoch` takes
                them, which saves memory. On several processes True gives all outputs to each of them. "main" gives them
                to the main process, and none to the others. "own" leaves each process the part that it has evaluated;
                in the order of the ranks the parts are in data set order.
            batch_size: samples a batch, on each process, of data sets and of the module's loaders; by default
                `args.val_batch_size`.
            collate_fn: makes batches of the data sets that are given.
            pad_value: fills up outputs whose shapes differ in another dimension than the first, at the end of each
                dimension. Without it such outputs come back as a list with one tensor a batch.

        Returns:
            The outputs by loader; their attribute `metrics` has losses and metrics by name.
        """
        with self._context.fail_together():
            run = self._ready() if log and self.args.resume is not False else self._ready_to_evaluate()
            outputs = run.evaluator.run_standalone(
                Stage.VAL,
                dataloaders,
                log,
                keep_outputs,
                batch_size=batch_size,
                collate_fn=collate_fn,
                pad_value=pad_value,
            )
            if self._saver.pending_save and not self._context.busy:
                self._saver.pending_save = False
                self._saver.save(force=True)
            return outputs

    def test(
        self,
        dataloaders: Any = None,
        *,
        log: bool | None = None,
        keep_outputs: Kept = True,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pad_value: float | None = None,
    ) -> EvaluationOutputs:
        """Run `test_step` over test data, as `validate` does.

        Raises:
            ModuleContractError: there is no data.
        """
        with self._context.fail_together():
            run = self._ready() if log and self.args.resume is not False else self._ready_to_evaluate()
            return run.evaluator.run_standalone(
                Stage.TEST,
                dataloaders,
                log,
                keep_outputs,
                batch_size=batch_size,
                collate_fn=collate_fn,
                pad_value=pad_value,
            )

    def predict(
        self,
        dataloader: Any,
        *,
        stream: bool = False,
        keep_outputs: Kept = True,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pad_value: float | None = None,
    ) -> Any:
        """Run `predict_step` over `dataloader`; returns what it returned, joined in data set order.

        Args:
            dataloader: a loader or a data set, or a dict of them by name, which gives a dict of outputs.
            stream: return an iterator over the outputs of single batches, on the CPU, in data set order. It predicts
                as it is read, so that nothing is collected. On several processes all of them get all batches, and read
                to the same place.
            keep_outputs: as for `validate`. With "main" the result is None on the other processes.
            batch_size: as for `validate`.
            collate_fn: as for `validate`.
            pad_value: as for `validate`.

        Raises:
            ConfigurationError: `stream` with a dict, with `pad_value` or with `keep_outputs`.
        """
        check_kept(keep_outputs)
        if stream and keep_outputs is not True:
            raise ConfigurationError(
                f"predict(stream=True, keep_outputs={keep_outputs!r}): a stream gives each batch to all processes and "
                "keeps none. Leave keep_outputs out."
            )
        if stream and (isinstance(dataloader, dict) or pad_value is not None):
            raise ConfigurationError(
                "predict(stream=True) gives the outputs of each batch as predict_step returned them: give one loader "
                "or data set, and no pad_value."
            )
        with self._context.fail_together():
            evaluator = self._ready_to_evaluate().evaluator
            loaders = evaluator.loaders_over(dataloader, batch_size, collate_fn, "the caller of predict")
            if stream:
                return evaluator.stream(Stage.PREDICT, loaders["default"])
            outputs = evaluator.evaluate(Stage.PREDICT, loaders, keep=keep_outputs, pad_value=pad_value)
            return outputs if isinstance(dataloader, dict) else outputs.get("default")

    def gather(self, outputs: Any) -> Any:
        """What every process gives, joined along dimension 0 in the order of the ranks, on every process.

        Tensors may differ in their first dimension; lists are put one after the other; dicts and tuples are joined
        item by item. All processes must call it together.
        """
        with self._context.fail_together():
            self._ready()
            return self.trainer_backend.gather(outputs)
