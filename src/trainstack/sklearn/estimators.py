"""`TrainstackClassifier` and `TrainstackRegressor` train a network with the interface of scikit-learn."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainstack.checkpointing import DefaultCheckpointerArguments
from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer import SupervisedModule, Trainer, TrainerArguments

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtraError("trainstack.sklearn", "scikit-learn", "sklearn") from error

_HIDDEN = 64  # units of the default network
_ROWS = 256
"""Rows of each forward pass of a prediction, so that the result of a row does not depend on the others."""

ModelSource = nn.Module | Callable[[int, int], nn.Module] | None


class _Estimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn carries no types
    def __init__(
        self,
        model: ModelSource = None,
        *,
        optimizer: Any = "adamw",
        optimizer_kwargs: Mapping[str, Any] | None = None,
        loss: Callable[..., Any] | None = None,
        epochs: int = 30,
        batch_size: int = 32,
        trainer_args: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        random_state: Any = None,
    ) -> None:
        self.model, self.optimizer, self.optimizer_kwargs, self.loss = model, optimizer, optimizer_kwargs, loss
        self.epochs, self.batch_size, self.trainer_args = epochs, batch_size, trainer_args
        self.callbacks, self.random_state = callbacks, random_state

    def _fit(self, inputs: Any, targets: torch.Tensor, outputs: int, loss: nn.Module) -> None:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        data = TensorDataset(torch.as_tensor(inputs), targets)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = self._build(inputs.shape[1], outputs)
            _check_outputs(network, data.tensors[0][:2], outputs)
            options = {"lr": 1e-2} if self.optimizer_kwargs is None else self.optimizer_kwargs
            module = SupervisedModule(network, self.loss or loss, self.optimizer, data, optimizer_kwargs=options)
            with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
                trainer = Trainer(module, self._arguments(seed, folder), callbacks=copy.deepcopy(self.callbacks))
                trainer.train()
                trainer.close()
        self.model_, self.history_, self.n_iter_ = network.eval(), trainer.history, trainer.state.epoch

    def _build(self, features: int, outputs: int) -> nn.Module:
        if self.model is None:
            return nn.Sequential(nn.Linear(features, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, outputs))
        made = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model(features, outputs)
        if not isinstance(made, nn.Module):
            raise ConfigurationError(
                f"model(features, outputs) returned a {type(made).__name__}. Return a torch.nn.Module that maps "
                f"(rows, {features}) to (rows, {outputs})."
            )
        return made

    def _arguments(self, seed: int, folder: str) -> TrainerArguments:
        own: dict[str, Any] = {
            "epochs": self.epochs,
            "train_batch_size": self.batch_size,
            "seed": seed,
            "output_dir": folder,
            "checkpointer_args": DefaultCheckpointerArguments(checkpoint=False),
            "writers": (),
            "report": False,
            "progress": "none",
            "handle_signals": False,
            "log_level": "ERROR",
        }
        return TrainerArguments.from_dict({**own, **(self.trainer_args or {})})

    def _outputs(self, X: Any) -> torch.Tensor:
        """The outputs of the network on the CPU, in float64, `(rows, outputs)`."""
        check_is_fitted(self)
        inputs = torch.as_tensor(validate_data(self, X, dtype=np.float32, reset=False))
        device = next((p.device for p in self.model_.parameters()), torch.device("cpu"))
        padded = torch.cat([inputs, inputs.new_zeros(-len(inputs) % _ROWS, inputs.shape[1])])
        with torch.inference_mode():
            parts = [self.model_(rows.to(device)).cpu().double() for rows in torch.split(padded, _ROWS)]
        return torch.cat(parts)[: len(inputs)]


def _check_outputs(network: nn.Module, rows: torch.Tensor, outputs: int) -> None:
    """Refuse outputs that would be broadcast against the targets, or that have another number of columns."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        made = copy.deepcopy(network).eval()(rows)
    wanted = (len(rows), outputs)
    if not isinstance(made, torch.Tensor) or made.shape != wanted:
        given = f"shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else f"type {type(made).__name__}"
        raise ConfigurationError(
            f"the model maps {len(rows)} rows to outputs of {given}, but {wanted} is needed. Let its last layer have "
            f"{outputs} outputs, and return a tensor of two dimensions."
        )


class TrainstackClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A classifier for scikit-learn that trains a network with trainstack.

    Args:
        model: a network, which is copied, or a function `(features, classes)` that returns one; its outputs are logits,
            `(rows, classes)`. None for one hidden layer of 64 units.
        optimizer: as in `SupervisedModule`.
        optimizer_kwargs: likewise; a learning rate of 0.01 if None.
        loss: of logits and the numbers of classes, int64 `(rows,)`; cross-entropy if None.
        epochs: passes over the data.
        batch_size: rows a global step.
        trainer_args: further arguments of `TrainerArguments`, such as `{"device": "cpu"}`. By default nothing is
            written.
        callbacks: for the trainer; they are copied for each fit.
        random_state: seeds the initial weights and the order of the data.

    Attributes:
        classes_: the labels, in the order of the outputs.
        model_: the trained network, in evaluation mode.
        history_: the metrics of the training.
        n_iter_: epochs trained.
    """

    def fit(self, X: Any, y: Any) -> TrainstackClassifier:
        """Train on `X`, `(rows, features)`, and the labels `y`, `(rows,)`.

        Raises:
            ValueError: the data does not have these shapes, has nan or inf, or `y` has less than two classes.
        """
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y has one class; pass the rows of at least two classes.")
        self._fit(X, torch.as_tensor(numbers), len(self.classes_), nn.CrossEntropyLoss())
        return self

    def predict_proba(self, X: Any) -> Any:
        """The probabilities of the classes, float64 `(rows, classes)`."""
        return self._outputs(X).softmax(1).numpy()

    def predict(self, X: Any) -> Any:
        """The labels of the rows of `X`, `(rows,)`."""
        outputs = self._outputs(X)
        return self.classes_[outputs.argmax(1).numpy()]


class TrainstackRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A regressor for scikit-learn that trains a network with trainstack.

    Targets are standardized for the training, and predictions have the scale of the targets.

    Args:
        model: a network, which is copied, or a function `(features, targets)` that returns one; its outputs are
            `(rows, targets)`. None for one hidden layer of 64 units.
        optimizer: as in `SupervisedModule`.
        optimizer_kwargs: likewise; a learning rate of 0.01 if None.
        loss: of outputs and standardized targets, both float32 `(rows, targets)`; the mean squared error if None.
        epochs: passes over the data.
        batch_size: rows a global step.
        trainer_args: further arguments of `TrainerArguments`, such as `{"device": "cpu"}`. By default nothing is
            written.
        callbacks: for the trainer; they are copied for each fit.
        random_state: seeds the initial weights and the order of the data.

    Attributes:
        model_: the trained network, in evaluation mode.
        mean_, scale_: of the targets, float64.
        history_: the metrics of the training.
        n_iter_: epochs trained.
    """

    def fit(self, X: Any, y: Any) -> TrainstackRegressor:
        """Train on `X`, `(rows, features)`, and `y`, `(rows,)` or `(rows, targets)`.

        Raises:
            ValueError: the data does not have these shapes, or has nan or inf.
        """
        X, y = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            self.mean_, self.scale_ = y.mean(0), y.std(0)
        if not np.all(np.isfinite(self.scale_)):
            raise ValueError("the variance of y is beyond float64. Scale y to a larger unit.")
        self.scale_ = np.where(self.scale_ > 0, self.scale_, 1.0)
        scaled = torch.as_tensor((y - self.mean_) / self.scale_, dtype=torch.float32).reshape(len(y), -1)
        self._fit(X, scaled, scaled.shape[1], nn.MSELoss())
        return self

    def predict(self, X: Any) -> Any:
        """The targets of the rows of `X`, float64, with the shape of the targets in `fit`."""
        outputs = self._outputs(X).numpy()
        return outputs.reshape(len(outputs), *np.shape(self.mean_)) * self.scale_ + self.mean_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
