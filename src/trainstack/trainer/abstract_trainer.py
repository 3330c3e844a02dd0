"""What every trainer offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class AbstractTrainer(ABC):
    """Runs a module. Events and callbacks use a trainer through this class."""

    @abstractmethod
    def train(self) -> None:
        """Train, and validate as the arguments say."""

    @abstractmethod
    def validate(self) -> dict[str, Any]:
        """Evaluate the validation data; outputs by loader."""

    @abstractmethod
    def test(self) -> dict[str, Any]:
        """Evaluate the test data; outputs by loader."""

    @abstractmethod
    def predict(self, dataloader: Any) -> Any:
        """Predict for the data of `dataloader`; the collected outputs."""

    @property
    @abstractmethod
    def is_main_process(self) -> bool:
        """Whether this process writes checkpoints and logs."""

    @abstractmethod
    def request_stop(self, reason: str) -> None:
        """Ask for the end of the training at the next step boundary."""
