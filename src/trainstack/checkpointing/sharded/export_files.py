"""Division of an export into several files, in the form that `from_pretrained` of other libraries reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import torch

from trainstack.checkpointing import manifest
from trainstack.checkpointing.tensorfile import TensorPart
from trainstack.errors import ConfigurationError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]?)(i?)B", re.IGNORECASE)


def bytes_of_size(name: str, value: int | str | None) -> int | None:
    """A size in bytes, such as 5000000000, "5GB" (10 ** 9 bytes each) or "500MiB" (2 ** 20 bytes each).

    Raises:
        ConfigurationError: `value` is not a size.
    """
    if value is None:
        return None
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found:
        base, power = (1024 if found[3] else 1000), " KMGT".index(found[2].upper() or " ")
        value = int(float(found[1]) * base**power)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}={value!r}: it is not a size. Write an int, or a text such as '100B', '5GB'.")
    return value


def divide(
    tensors: Mapping[str, torch.Tensor], limit: int | None
) -> tuple[dict[str, TensorPart], dict[str, bytes]] | None:
    """The tensors of each file, in their order, with at most `limit` bytes in each, and the JSON with the names of the
    files.

    A larger tensor has a separate file. None if one file is enough.
    """
    if limit is None or sum(tensor.nbytes for tensor in tensors.values()) <= limit:
        return None
    groups: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if groups[-1] and filled + tensor.nbytes > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += tensor.nbytes
    files = {manifest.export_file(number, len(groups)): group for number, group in enumerate(groups, 1)}
    parts = {
        file: TensorPart.of(group, {name: (list(one.shape), 0) for name, one in group.items()})
        for file, group in files.items()
    }
    places = {name: file for file, group in files.items() for name in group}
    total = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n"
    return parts, {manifest.WEIGHT_MAP_FILE: text.encode()}
