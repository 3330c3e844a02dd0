"""`write_predictions` writes predictions as a file of torch, of numpy, or with one JSON object for each sample."""

from __future__ import annotations

import inspect
import json
import math
import os
import pickle
import re
import secrets
import signal
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainstack.backends.processes.gathering import StepList
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


def write_predictions(trainer: Trainer, data: str, make_data: Callable[..., Any] | None, path: Path) -> dict[str, Any]:
    """Predict, and write the file on the main process.

    Args:
        trainer: its module predicts.
        data: the option `--data`: "test" or "val" for the loaders of the module, or the name of `make_data`.
        make_data: returns a data set, a loader or a dict of these.
        path: of the file.

    Returns:
        The path of the file as `"written"`, and the number of samples as `"samples"` where each has a line.

    Raises:
        ConfigurationError: there is no such data, or a file of this name has appeared.
        ModuleContractError: the predictions do not fit into the format.
    """
    evaluator = trainer._ready_to_evaluate().evaluator
    if make_data is not None:
        try:
            inspect.signature(make_data).bind()
        except TypeError as error:
            raise ConfigurationError(
                f"--data {data}: the function is called without arguments ({error}). Give its parameters defaults."
            ) from None
        given = make_data()
        loaders = evaluator.loaders_over(given, None, None, f"--data {data}")
        is_one = not isinstance(given, dict)
    else:
        loaders, name = evaluator.loaders_of(Stage[data.upper()]), type(trainer.module).__name__
        if not loaders:
            raise ConfigurationError(
                f"{name} has no {data} data. Define get_{data}_dataloaders(self, sampler, batch_size), or write --data "
                "FILE.py:NAME with a function that returns data."
            )
        is_one = list(loaders) == ["default"]
    return {"written": str(path), **_WRITERS[path.suffix](trainer, loaders["default"] if is_one else loaders, path)}


def _write_torch(trainer: Trainer, data: Any, path: Path) -> dict[str, Any]:
    found = trainer.predict(data, keep_outputs="main")
    if trainer.is_main_process:
        _write(path, lambda temporary: _save_tensors(temporary, _without_classes(found)))
    return {}


def _save_tensors(path: Path, value: Any) -> None:
    try:
        with path.open("xb") as file:
            torch.save(value, file)
        torch.load(path, weights_only=True, mmap=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise ModuleContractError(
            f"predict_step returned an object{f' of the class {name[1]}' if name else ''}, which torch.load(file) does "
            "not read. Return tensors, numbers and texts."
        ) from error
    except RuntimeError as error:  # torch replaces the error of a full disk
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _write_numpy(trainer: Trainer, data: Any, path: Path) -> dict[str, Any]:
    found = trainer.predict(data, keep_outputs="main")
    if trainer.is_main_process:
        arrays = list(_arrays(found, ""))
        _check_names([name for name, _ in arrays], "arrays")
        _write(path, lambda temporary: _save_arrays(temporary, arrays))
    return {}


def _save_arrays(path: Path, arrays: Iterable[tuple[str, Any]]) -> None:
    with zipfile.ZipFile(path, "x") as file:  # np.savez refuses an array with the name of one of its parameters
        for name, array in arrays:
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def _write_lines(trainer: Trainer, data: Any, path: Path) -> dict[str, Any]:
    samples = 0

    def write(temporary: Path) -> None:
        nonlocal samples
        with temporary.open("x", encoding="ascii") as file:
            for row in _all_rows(trainer, data):
                file.write(json.dumps(row, allow_nan=False) + "\n")
                samples += 1

    if trainer.is_main_process:
        _write(path, write)
    else:
        for _ in _all_rows(trainer, data):  # each process takes part in the rounds of a stream
            samples += 1
    return {"samples": samples}


_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write the file, which appears complete and replaces none. An exception or signal deletes the temporary one."""
    made, owner = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}"), os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:  # not in a worker of a loader
            made.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    signals = [number for number in _SIGNALS if is_main and signal.getsignal(number) == signal.SIG_DFL]
    for number in signals:
        signal.signal(number, end)
    try:
        write(made)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
    try:
        path.touch(exist_ok=False)  # atomic, and links are not available everywhere
    except FileExistsError:
        raise ConfigurationError(
            f"--output {path}: the file has appeared since predict began, and is not replaced. The predictions are in "
            f"{made}: give this file another name."
        ) from None
    os.replace(made, path)


def _check_names(names: Iterable[Any], what: str) -> None:
    """Refuse equal names, of which a file would keep one."""
    twice = [name for name, count in Counter(map(str, names)).items() if count > 1]
    if twice:
        raise ModuleContractError(
            f"predict_step returned several {what} with the name {twice[0]!r} in the file. Rename a key, or write "
            "--output FILE.pt."
        )


def _without_classes(value: Any) -> Any:
    """`value` with the lists and dicts of Python and tensors for arrays, for `torch.load` with `weights_only=True`."""
    if isinstance(value, Mapping):
        return {key: _without_classes(item) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.isnative and value.dtype.kind in "biufc":
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
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
    if value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64):
        value = value.float()  # numpy has no bfloat16 and float8
    return value.numpy(force=True)


def _all_rows(trainer: Trainer, data: Any) -> Iterator[dict[str, Any]]:
    samples = _Samples()
    for name, loader in data.items() if isinstance(data, dict) else [(None, data)]:
        for outputs, count in trainer._ready_to_evaluate().evaluator.stream(Stage.PREDICT, loader):
            for row in samples.rows(outputs, count):
                if name is not None and "loader" in row:
                    _check_names(["loader", "loader"], "values")
                yield row if name is None else {"loader": name, **row}


class _Samples:
    """Splits the outputs of batches into JSON objects, one for each sample.

    Tensors have a row for each sample. A list has an item for each sample, or is split item by item like tuples, if its
    tensors have such rows. The first batch decides, because a later one may fit both. Each sample gets other values.
    """

    def __init__(self) -> None:
        self._by_position: dict[str, bool] = {}

    def rows(self, outputs: Any, count: int | None) -> Iterator[dict[str, Any]]:
        """The objects for a batch of `count` samples; None if their number is unknown."""
        count = next(iter(_lengths(outputs)), -1) if count is None else count
        rows = self._split(outputs, "outputs", count)
        if not self._by_position and not _lengths(outputs):
            raise _refusal("outputs without a tensor or list", count)
        yield from rows if isinstance(outputs, Mapping) else ({"output": row} for row in rows)

    def _split(self, value: Any, place: str, count: int) -> list[Any]:
        if isinstance(value, Tensor | np.ndarray) and value.ndim:
            if len(value) != count:
                raise _refusal(f"{place} of shape {tuple(value.shape)}", count)
            return [_plain(row, place) for row in value.tolist()]
        if isinstance(value, list) and not self._is_by_position(value, place, count):
            return [_plain(item, place) for item in value]
        if not isinstance(value, Mapping | list | tuple) or not value:
            return [_plain(value, place)] * count
        keys = list(value) if isinstance(value, Mapping) else range(len(value))
        rows = zip(*(self._split(value[key], f"{place}[{key!r}]", count) for key in keys), strict=True)
        if not isinstance(value, Mapping):
            return [list(row) for row in rows]
        _check_names(keys, f"keys of {place}")
        return [dict(zip(map(str, keys), row, strict=True)) for row in rows]

    def _is_by_position(self, value: list[Any], place: str, count: int) -> bool:
        if place not in self._by_position:
            self._by_position[place] = _lengths(tuple(value)) == {count}
            if self._by_position[place] and len(value) == count:
                both = f"{place}, a list whose items and their rows may both be the samples,"
                raise _refusal(both, count, "a tuple if the rows are, use another --val_batch_size if not")
        if not self._by_position[place] and len(value) != count:
            raise _refusal(f"{place}, a list of {len(value)} items,", count)
        return self._by_position[place]


def _refusal(what: str, count: int, instead: str = "values with one item for each sample") -> ModuleContractError:
    return ModuleContractError(
        f"predict_step returned {what} for a batch of {'unknown' if count < 0 else count} samples, and each sample "
        f"gets one line. Return {instead}, or write --output FILE.pt."
    )


def _lengths(value: Any) -> set[int]:
    """The first dimensions of the tensors and arrays in `value`."""
    if isinstance(value, Tensor | np.ndarray):
        return {len(value)} if value.ndim else set()
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return set[int]().union(*map(_lengths, items))


def _plain(value: Any, place: str) -> Any:
    """`value` as JSON has it; inf and nan are text."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if value is None or isinstance(value, float | bool | int | str):
        return value
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _plain(value.tolist(), place)
    if isinstance(value, list | tuple):
        return [_plain(item, place) for item in value]
    if isinstance(value, Mapping):
        _check_names(value, f"keys of {place}")
        return {str(key): _plain(item, place) for key, item in value.items()}
    raise ModuleContractError(
        f"predict_step returned {place} with an object of the class {type(value).__name__}, and JSON has no such "
        "values. Return numbers and texts, or write --output FILE.pt."
    )


_WRITERS: dict[str, Callable[[Trainer, Any, Path], dict[str, Any]]] = {
    ".pt": _write_torch,
    ".npz": _write_numpy,
    ".jsonl": _write_lines,
}
