"""The methods of a trainer that evaluate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from trainstack.errors import ConfigurationError
from trainstack.stage import Stage
from trainstack.trainer.evaluation.outputs import Kept, check_kept
from trainstack.trainer.mixins.base import TrainerBase

if TYPE_CHECKING:
    from trainstack.trainer.evaluation.outputs import EvaluationOutputs


class EvaluationMixin(TrainerBase):
    """Validates, tests, predicts and gathers outputs."""

    def validate(
        self,
        dataloaders: Any = None,
        *,
        log: bool | None = None,
        keep_outputs: Kept = True,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pad_value: float | None = None,
        **unknown: NoReturn,
    ) -> EvaluationOutputs:
        """Run `val_step` over validation data and call `on_end_val_epoch`. Callbacks may call it in any hook.

        Before training it needs neither training data nor optimizers, except with a layer that prepares both together,
        such as `dp`. The weights are then those of `resume` or `init_weights_from`, or the initial ones.

        Args:
            dataloaders: a loader, a dataset with a length, or a dict of these by name; None for the loaders of the
                module. The loss of the loader "shifted" is `val/shifted/loss`, that of a single loader `val/loss`.
            log: whether metrics are recorded in the history; None: only during training, in a hook.
            keep_outputs: whether to return outputs. False saves memory: outputs are collected only if
                `on_end_val_epoch` takes them. With several processes, True gives all outputs to each process; "main"
                gives them only to the main process; "own" leaves to each process the outputs that it has computed, so
                that the parts in rank order are in dataset order.
            batch_size: samples a batch on each process, for datasets and for the module's loaders; None for
                `args.val_batch_size`.
            collate_fn: function that makes batches of the given datasets.
            pad_value: value that pads outputs at the end of each dimension, if their shapes differ in another dimension
                than the first. Without it, such outputs are returned as a list with one tensor a batch.
            unknown: always an error, which names the code to write.

        Returns:
            The outputs by loader; their attribute `metrics` has losses and metrics by name.

        Raises:
            ConfigurationError: an argument is unknown.
        """
        _refuse("validate", unknown)
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
        **unknown: NoReturn,
    ) -> EvaluationOutputs:
        """Run `test_step` over test data. Arguments and result are those of `validate`.

        Raises:
            ModuleContractError: there is no data.
            ConfigurationError: an argument is unknown.
        """
        _refuse("test", unknown)
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
        **unknown: NoReturn,
    ) -> Any:
        """Run `predict_step` over `dataloader` and return its results, joined in dataset order.

        The result is a tensor if the step returns one tensor, a list with one tensor for each item of a tuple, or a
        dict with the keys of a dict.

        Args:
            dataloader: a loader or a dataset, or a dict of these by name, for a dict of outputs.
            stream: whether to return an iterator over the outputs of single batches, on the CPU, in dataset order. It
                predicts while it is read and keeps no outputs. With several processes, each gets all batches, and all
                must read equally many.
            keep_outputs: as for `validate`. With "main" the result is None on the other processes.
            batch_size: as for `validate`.
            collate_fn: as for `validate`.
            pad_value: as for `validate`.
            unknown: as for `validate`.

        Raises:
            ConfigurationError: `stream` with a dict, with `pad_value` or with `keep_outputs`; an argument is unknown.
        """
        _refuse("predict", unknown)
        check_kept(keep_outputs)
        if stream and keep_outputs is not True:
            raise ConfigurationError(
                f"predict(stream=True, keep_outputs={keep_outputs!r}): a stream gives each batch to all processes and "
                "keeps none. Remove keep_outputs."
            )
        if stream and (isinstance(dataloader, dict) or pad_value is not None):
            raise ConfigurationError(
                "predict(stream=True) returns the outputs of each batch as predict_step returned them: write one "
                "loader or dataset, and no pad_value."
            )
        with self._context.fail_together():
            evaluator = self._ready_to_evaluate().evaluator
            loaders = evaluator.loaders_over(dataloader, batch_size, collate_fn, "the caller of predict")
            if stream:
                return (outputs for outputs, _ in evaluator.stream(Stage.PREDICT, loaders["default"]))
            outputs = evaluator.evaluate(Stage.PREDICT, loaders, keep=keep_outputs, pad_value=pad_value)
            return outputs if isinstance(dataloader, dict) else outputs.get("default")

    def gather(self, outputs: Any) -> Any:
        """Join the values of all processes along dimension 0 in rank order, with the result on every process.

        Tensors may differ in their first dimension; lists are concatenated; dicts and tuples are joined item by item.
        Collective: all processes must call it together.

        Args:
            outputs: nested tensors, lists, tuples and dicts.
        """
        with self._context.fail_together():
            self._ready()
            return self.trainer_backend.gather(outputs)


_WEIGHTS = (
    "The weights are those of the module. For the best checkpoint, call trainstack.warm_start(trainer.module, "
    'f"{trainer.checkpointer.save_dir}/best", strict=True) before.'
)
_ELSEWHERE = {
    **dict.fromkeys(("ckpt_path", "checkpoint", "weights"), _WEIGHTS),
    **dict.fromkeys(("model", "module"), "The model is the module of the Trainer."),
    "datamodule": "Give the loaders or datasets as the first argument.",
    "verbose": "The results are in the attribute metrics of the returned outputs.",
}
"""Arguments of the methods of Lightning's trainer, and their counterparts."""


def _refuse(method: str, unknown: Mapping[str, Any]) -> None:
    if unknown:
        hints = dict.fromkeys(_ELSEWHERE[name] for name in unknown if name in _ELSEWHERE)
        known = "keep_outputs, batch_size, collate_fn and pad_value" + (", stream" if method == "predict" else ", log")
        how = " ".join(hints) or f"It takes data, {known}."
        raise ConfigurationError(f"Trainer.{method} has no argument {', '.join(map(repr, unknown))}. {how}")
