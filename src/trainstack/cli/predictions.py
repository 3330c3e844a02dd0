"""`write_predictions` writes predictions as a file of torch, of numpy, or with one JSON object for each sample."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainstack._files import temporary_path
from trainstack.backends.processes.gathering import StepList
from trainstack.cli.printing import to_plain
from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.stage import Stage
from trainstack.trainer import Trainer


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is predicted.

    Raises:
        ConfigurationError: its name has another end, it exists, or its folder does not.
    """
    if path.suffix not in _WRITERS:
        ends = ", ".join(f"{path.stem}{end}" for end in _WRITERS)
        raise ConfigurationError(f"--output {path}: the end of the name selects the format. Write one of {ends}.")
    if path.exists():
        raise ConfigurationError(f"--output {path}: the file exists, and is not replaced. Write another name.")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--output {path}: there is no folder {path.parent}. Make it, or write another one.")


def write_predictions(trainer: Trainer, data: Any, path: Path) -> dict[str, Any]:
    """Predict, and write the file on the main process.

    Args:
        trainer: its module predicts.
        data: "test" or "val" for the loaders of the module, or a data set, a loader or a dict of these.
        path: of the file.

    Returns:
        The path of the file as `"written"`, and the number of samples as `"samples"` where each has a line.

    Raises:
        ConfigurationError: the module has no such data.
        ModuleContractError: the predictions do not fit into the format.
    """
    if isinstance(data, str):
        stage, name = Stage[data.upper()], type(trainer.module).__name__
        data = trainer._ready_to_evaluate().evaluator.loaders_of(stage)
        if not data:
            raise ConfigurationError(
                f"{name} has no {stage.name.lower()} data. Define get_{stage.name.lower()}_dataloaders(self, sampler, "
                "batch_size), or write --data FILE.py:NAME with a function that returns data."
            )
        data = data["default"] if list(data) == ["default"] else data
    return {"written": str(path), **_WRITERS[path.suffix](trainer, data, path)}


def _write_torch(trainer: Trainer, data: Any, path: Path) -> dict[str, Any]:
    found = trainer.predict(data, keep_outputs="main")
    if trainer.is_main_process:
        _write(path, lambda temporary: torch.save(_without_classes(found), temporary))
    return {}


def _write_numpy(trainer: Trainer, data: Any, path: Path) -> dict[str, Any]:
    found = trainer.predict(data, keep_outputs="main")
    if trainer.is_main_process:
        arrays = dict(_arrays(found, ""))
        _write(path, lambda temporary: _save_arrays(temporary, arrays))
    return {}


def _save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    with path.open("wb") as file:  # numpy adds .npz to a path without it
        np.savez(file, **arrays)


def _write_lines(trainer: Trainer, data: Any, path: Path) -> dict[str, Any]:
    samples = 0

    def write(temporary: Path) -> None:
        nonlocal samples
        with temporary.open("w", encoding="ascii") as file:
            for row in _all_rows(trainer, data):
                file.write(json.dumps(to_plain(row), allow_nan=False) + "\n")
                samples += 1

    if trainer.is_main_process:
        _write(path, write)
    else:
        for _ in _all_rows(trainer, data):  # each process takes part in the rounds of a stream
            samples += 1
    return {"samples": samples}


def _write(path: Path, write: Callable[[Path], object]) -> None:
    temporary = temporary_path(path)
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _without_classes(value: Any) -> Any:
    """`value` with the lists and dicts of Python, which `torch.load` reads with `weights_only=True`."""
    if isinstance(value, Mapping):
        return {key: _without_classes(item) for key, item in value.items()}
    return [_without_classes(item) for item in value] if isinstance(value, list | tuple) else value


def _arrays(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The arrays in predictions, by the path of keys and positions that leads to each; "output" for a single one."""
    if isinstance(value, Tensor):
        yield name or "output", _as_numpy(value)
    elif isinstance(value, Mapping | list | tuple) and not isinstance(value, StepList):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from _arrays(item, f"{name}/{key}" if name else str(key))
    else:
        raise ModuleContractError(
            f"the predictions {name or 'of predict_step'} are not one tensor: their shapes differ between batches, or "
            "they are other objects. Write --output FILE.pt or FILE.jsonl."
        )


def _as_numpy(value: Tensor) -> Any:
    if value.dtype is torch.bfloat16:  # numpy has no such dtype
        value = value.float()
    return value.numpy()


def _all_rows(trainer: Trainer, data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        for name, one in data.items():
            yield from ({"loader": name, **row} for row in _rows_of(trainer, one))
    else:
        yield from _rows_of(trainer, data)


def _rows_of(trainer: Trainer, data: Any) -> Iterator[dict[str, Any]]:
    for outputs in trainer.predict(data, stream=True):
        yield from _samples(outputs if isinstance(outputs, Mapping) else {"output": outputs})


def _samples(outputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The outputs of a batch as one object for each sample.

    A number or text of the whole batch, such as a temperature, is in the object of each of its samples.

    Raises:
        ModuleContractError: tensors and lists have different lengths.
    """
    lengths = {_length(value) for value in _leaves(outputs)} - {None}
    if len(lengths) != 1:
        raise ModuleContractError(
            f"predict_step returned tensors and lists of the lengths {sorted(map(str, lengths))} for one batch, and "
            "each sample gets one line. Return values with one item for each sample, or write --output FILE.pt."
        )
    for index in range(lengths.pop() or 0):
        yield {str(key): _item(value, index) for key, value in outputs.items()}


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors, lists and other values below dicts and tuples."""
    if isinstance(value, Mapping | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    else:
        yield value


def _length(value: Any) -> int | None:
    """The number of samples in a leaf; None for one value of the batch."""
    if isinstance(value, Tensor | np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list) else None


def _item(value: Any, index: int) -> Any:
    """The part of one sample."""
    if isinstance(value, Mapping):
        return {key: _item(item, index) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_item(item, index) for item in value]
    part = value if _length(value) is None else value[index]
    return part.tolist() if isinstance(part, Tensor | np.ndarray | np.generic) else part


_WRITERS: dict[str, Callable[[Trainer, Any, Path], dict[str, Any]]] = {
    ".pt": _write_torch,
    ".npz": _write_numpy,
    ".jsonl": _write_lines,
}
