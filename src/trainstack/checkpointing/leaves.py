"""What the encoder needs to know of single values: identities, bytes, and words for what it refuses."""

from __future__ import annotations

from collections import defaultdict
from enum import Enum
from typing import Any

import numpy as np
import torch

from trainstack.checkpointing import tags


def type_name(value: Any) -> str:
    """Return the type of `value` with its module, as a message names it."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def explain_refusal(where: str, value: Any) -> str:
    """Return the sentence for a value that the format does not hold."""
    if isinstance(value, Enum):
        advice = "Store its .value or its .name in get_state()."
    elif isinstance(value, torch.Generator):
        advice = "Store generator.get_state() in get_state()."
    elif isinstance(value, torch.Tensor):
        advice = "Convert it in get_state() to a dense, plain torch.Tensor of a standard dtype."
    elif type(value) is defaultdict:
        known = ", ".join(name for name in tags.FACTORIES if name is not None)
        advice = f"Return dict(...) of it in get_state(), or take one of these factories: {known}."
    else:
        advice = "Convert it in get_state() to tensors, numbers, strings, lists or dicts."
    return f"{where} holds a {_kind_of(value)}, which a checkpoint cannot store. {advice}"


def _kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        layout = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        return f"{type_name(value)} (layout {layout}, {value.dtype}, device {value.device.type})"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{type_name(value)} of dtype {value.dtype}"
    if type(value) is defaultdict:
        return f"{type_name(value)} with a factory of its own"
    return type_name(value)


def tensor_identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share if they are the same view of the same memory."""
    if tensor.numel() == 0:
        return ("empty", id(tensor))
    view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (tensor.device, tensor.untyped_storage().data_ptr(), *view, tensor.is_conj(), tensor.is_neg())


def array_as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return `array` as a tensor: shared memory where that is safe, raw bytes for dtypes torch lacks."""
    if not (array.flags.c_contiguous and array.flags.writeable and array.flags.aligned):
        array = np.array(array, order="C", copy=True)
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # text, dates, foreign byte order: kept as bytes beside their dtype
        return torch.from_numpy(array.reshape(-1).view(np.uint8))
