"""`run_step` runs one step of a module alone, for unit tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainstack.backends import move_to_device
from trainstack.backends.losses import find_loss
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage
from trainstack.trainer.core.several_updates import yields_updates
from trainstack.trainer.core.state import RunState
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.tracking.history import RunHistory
from trainstack.trainer.tracking.log_sink import LogSink


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outputs of a step, and the values that it logged.

    Attributes:
        loss: the loss of `train_step`, 0-dim and detached; None for other stages.
        outputs: the value that the step returned.
        logged: numbers, images (uint8 arrays), texts and tables by name.
    """

    loss: Tensor | None
    outputs: Any
    logged: dict[str, Any] = field(default_factory=dict)


def run_step(
    module: ModuleInterface,
    batch: Any,
    *,
    stage: Stage = Stage.TRAIN,
    global_step: int = 1,
    device: torch.device | str | None = None,
) -> StepResult:
    """Run the step of `module` for `stage` on one batch, as a trainer does.

    A training step runs in training mode and accumulates gradients in `.grad`. No optimizer steps. The other steps run
    in eval mode without gradients. The modes are restored.

    Args:
        module: the module. It is not moved to `device`.
        batch: the batch. Its tensors are moved to `device`.
        stage: chooses `train_step`, `val_step`, `test_step` or `predict_step`.
        global_step: the number that the step receives.
        device: by default that of the first parameter.

    Raises:
        ConfigurationError: `module` is not a ModuleInterface, or its `train_step` yields.
        ModuleContractError: `train_step` returned no loss.

    Examples:
        >>> from trainstack.testing import run_step
        >>> result = run_step(module, (x[:4], 3 * x[:4]))
        >>> result.loss.shape
        torch.Size([])
    """
    if not isinstance(module, ModuleInterface):
        raise ConfigurationError(f"run_step was given a {type(module).__name__}. Give an instance of ModuleInterface.")
    if stage is Stage.TRAIN and yields_updates(module):
        raise ConfigurationError(
            f"train_step of {type(module).__name__} yields: its updates need optimizers, and run_step has none. Give "
            "the module to a Trainer with fast_dev_run=True."
        )
    if device is None:
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    device, trains = torch.device(device), stage is Stage.TRAIN
    modes = {part: part.training for part in module.modules()}
    logged: dict[str, Any] = {}

    def write(kind: str, name: str, make: Callable[[], Any], step: int) -> None:
        logged[name] = make()

    sink = LogSink().connect(RunHistory(), RunState(current_step=global_step))
    sink.write = write
    before, module._log_sink = module._log_sink, sink
    try:
        module.train(trains)
        with torch.set_grad_enabled(trains):
            outputs = module.forward(stage, global_step, move_to_device(batch, device), device)
            loss = find_loss(outputs) if trains else None
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
    finally:
        module._log_sink = before
        for part, mode in modes.items():
            part.training = mode
    logged |= {name: sink.history.get_latest_metric(name) for name in sorted(sink.history.get_metric_names())}
    return StepResult(loss=None if loss is None else loss.detach(), outputs=outputs, logged=logged)
