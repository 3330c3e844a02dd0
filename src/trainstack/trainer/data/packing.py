"""`PackedDataset` packs sequences of tokens into rows of one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.trainer.core.samples import IGNORED_LABEL
from trainstack.trainer.data.epochs import WrapsDatasets

_TOKENS, _LABELS, _MASK = "input_ids", "labels", "attention_mask"


class PackedDataset(WrapsDatasets):
    """Rows of `row_length` tokens, each with several sequences of another dataset, with almost no padding.

    The same lengths always give the same rows. A row is a dict of tensors of shape `(row_length,)`:

    - `input_ids`, int64, and the other fields of the samples, which have one value for each token;
    - `labels`, int64: those of the samples, or their tokens; -100 for tokens without a label;
    - `position_ids`, int64: the position of each token in its sequence;
    - `segment_ids`, int64: 1 for the tokens of the first sequence, 2 for those of the second, ...; 0 is padding.

    No token may attend to another sequence: pass `document_mask(segment_ids)` to the model. A loss that is a mean over
    labels gives each label the same weight as without packing. A private run refuses packed data.

    Args:
        dataset: samples with indices: 1-dim tensors or lists of tokens, or dicts with `input_ids`. Tokens whose
            `attention_mask` is 0 are dropped.
        row_length: the number of tokens in a row.
        lengths: the lengths of the samples; None to read all samples once.
        shifts_labels: whether the model predicts each label from the tokens before it, as causal language models of
            transformers do. The first label of each sequence is then -100.
        pad_token: the token for padding.

    Raises:
        ConfigurationError: `row_length` is not a positive integer, or a sequence does not fit into a row.
        ModuleContractError: a sample has no tokens, another number of them than in `lengths`, or other fields than
            another sample of its row.

    Examples:
        >>> texts = [[5, 6, 7], [8, 9], [3, 4]]
        >>> packed = ts.PackedDataset(texts, row_length=5)
        >>> packed[0]["segment_ids"]
        tensor([1, 1, 1, 2, 2])
    """

    def __init__(
        self,
        dataset: Any,
        row_length: int,
        *,
        lengths: Sequence[int] | None = None,
        shifts_labels: bool = True,
        pad_token: int = 0,
    ) -> None:
        if type(row_length) is not int or row_length < 1:
            raise ConfigurationError(f"row_length={row_length!r}: write a whole number of tokens, 1 or more.")
        self.parts, self.row_length = [dataset], row_length
        self.shifts_labels, self.pad_token = shifts_labels, pad_token
        if lengths is None:
            lengths = [len(_fields(dataset[index], index)[_TOKENS]) for index in range(len(dataset))]
        if len(lengths) != len(dataset):
            raise ConfigurationError(f"{len(lengths)} lengths were given for {len(dataset)} samples.")
        self._lengths = [int(length) for length in lengths]
        if min(self._lengths, default=1) < 1:
            empty = next(index for index, length in enumerate(self._lengths) if length < 1)
            raise ConfigurationError(
                f"lengths[{empty}]={self._lengths[empty]}: a packed sample has 1 token or more. Remove empty samples."
            )
        longest = max(self._lengths, default=0)
        if longest > row_length:
            raise ConfigurationError(
                f"sample {self._lengths.index(longest)} has {longest} tokens, more than row_length={row_length}. "
                f"Truncate long samples before, or write row_length={longest}."
            )
        self._rows = _best_fit(self._lengths, row_length)

    def __len__(self) -> int:
        """The number of rows.

        Raises:
            ModuleContractError: the length of the dataset has changed since the rows were made.
        """
        if (now := len(self.parts[0])) != len(self._lengths):
            raise ModuleContractError(
                f"a PackedDataset was made of {len(self._lengths)} samples, and its data set has {now} now. Create it "
                "in get_train_dataloader, which is called for each epoch."
            )
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        columns: dict[str, list[Tensor]] = defaultdict(list)
        names = None
        for segment, sample in enumerate(self._rows[index], start=1):
            fields = _fields(self.parts[0][sample], sample)
            count = len(fields[_TOKENS])
            if count != self._lengths[sample]:
                raise ModuleContractError(
                    f"sample {sample} has {count} tokens, and had {self._lengths[sample]} when the rows were made. "
                    "A packed data set must give samples of the same lengths each time."
                )
            fields.setdefault(_LABELS, fields[_TOKENS].clone())
            if self.shifts_labels:
                fields[_LABELS] = torch.cat([fields[_LABELS].new_full((1,), IGNORED_LABEL), fields[_LABELS][1:]])
            fields["position_ids"] = torch.arange(count)
            fields["segment_ids"] = torch.full((count,), segment)
            if names not in (None, fields.keys()):  # the values would be shifted against the tokens
                raise ModuleContractError(
                    f"sample {sample} has the fields {sorted(fields)}, and another sample of its row has "
                    f"{sorted(columns)}. Give all samples of a packed data set the same fields."
                )
            names = fields.keys()
            for name, values in fields.items():
                columns[name].append(values)
        fill = {_TOKENS: self.pad_token, _LABELS: IGNORED_LABEL}
        return {name: self._filled(parts, fill.get(name, 0)) for name, parts in columns.items()}

    def _filled(self, parts: list[Tensor], value: int) -> Tensor:
        row = torch.cat(parts)
        return torch.cat([row, row.new_full((self.row_length - len(row), *row.shape[1:]), value)])


def _fields(sample: Any, index: int) -> dict[str, Tensor]:
    """The fields of a sample, each with one value for each token."""
    given = dict(sample) if isinstance(sample, Mapping) else {_TOKENS: sample}
    if _TOKENS not in given:
        raise ModuleContractError(f"sample {index} has no 'input_ids'. It has {sorted(map(str, given))}.")
    try:
        fields = {name: torch.as_tensor(values) for name, values in given.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModuleContractError(
            f"sample {index} is not a sequence of tokens: {error}. Give tensors, arrays or lists of numbers."
        ) from error
    count = fields[_TOKENS].shape
    if len(count) != 1 or not count[0]:
        raise ModuleContractError(
            f"sample {index} has no tokens: its input_ids have shape {tuple(count)}. Give one sequence of at least one "
            "token for each sample, without a batch dimension."
        )
    fields |= {name: _as_int64(fields[name], name, index) for name in (_TOKENS, _LABELS) if name in fields}
    wrong = [name for name, values in fields.items() if values.shape[:1] != count]
    if wrong:
        raise ModuleContractError(
            f"sample {index} has {count[0]} tokens, and {wrong[0]!r} has shape {tuple(fields[wrong[0]].shape)}. Remove "
            "fields that do not have one value for each token from a packed data set."
        )
    mask = fields.pop(_MASK, None)
    if mask is None:
        return fields
    if not mask.any():
        raise ModuleContractError(f"sample {index} has no tokens: its attention_mask is 0 everywhere. Remove it.")
    return {name: values[mask.bool()] for name, values in fields.items()}


def _as_int64(values: Tensor, name: str, index: int) -> Tensor:
    """`values` as int64. The unsigned types of token files cannot represent the label -100."""
    if values.is_floating_point() or values.is_complex():
        raise ModuleContractError(
            f"sample {index} has {name!r} of type {values.dtype}. Tokens and labels are integers: write .long()."
        )
    return values.long()


def _best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Rows of at most `size` tokens by best-fit decreasing: the longest sample comes first, into the fullest row that
    has room."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of `by_room`, ascending
    for sample in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(rooms, lengths[sample])
        if place == len(rooms):
            row, room = len(rows), size
            rows.append([])
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[row].append(sample)
        left = room - lengths[sample]
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(row)
    return rows


def document_mask(segment_ids: Tensor, *, causal: bool = True, dtype: torch.dtype = torch.bool) -> Tensor:
    """The attention mask of packed rows: a token only attends to its own sequence.

    Padding attends to padding, so that no row of the mask is empty.

    Args:
        segment_ids: tensor of shape `(batch, length)`, as in a `PackedDataset`.
        causal: whether a token only attends to itself and earlier tokens.
        dtype: the dtype of the mask. A `torch.bool` mask is True for allowed pairs, as in
            `scaled_dot_product_attention`. A floating-point mask is 0 for these and the lowest value for others; add it
            to the scores.

    Returns:
        a mask of shape `(batch, 1, length, length)` on the device of `segment_ids`.

    Examples:
        >>> mask = ts.document_mask(torch.tensor([[1, 1, 2]]))
        >>> mask[0, 0].int()
        tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.int32)
    """
    allowed = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    if causal:
        allowed = allowed.tril()
    if dtype is torch.bool:
        return allowed
    return torch.zeros((), dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)
