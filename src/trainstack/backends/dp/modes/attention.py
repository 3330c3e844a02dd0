"""Multi-head attention written with functions that `OpInterceptor` sees one by one."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    sequences: tuple[Tensor, Tensor, Tensor],
    heads: int,
    in_proj: tuple[Tensor, Tensor | None],
    out_proj: tuple[Tensor, Tensor | None],
    *,
    dropout: float,
    pairs: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    weights: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` where one weight projects query, key and value.

    Args:
        sequences: query, key and value, `(positions, batch, width)` or `(positions, width)`.
        heads: the number of heads.
        in_proj, out_proj: weight and bias of the projections.
        dropout: of the attention weights.
        pairs: a mask of pairs of positions, `(targets, sources)` or `(batch * heads, targets, sources)`; True or -inf
            where not to look.
        padding: likewise of the positions of each sequence, `(batch, sources)` or `(sources,)`.
        is_causal: `pairs` hides all later positions.
        weights: whether the attention weights are returned too, and whether as their mean over the heads.
    """
    is_batch = sequences[0].dim() == 3
    distinct = {id(x): x if is_batch else x.unsqueeze(1) for x in sequences}
    # A slice of the weight would be another tensor, so each sequence is projected in full.
    projected = {key: F.linear(x, *in_proj).chunk(3, -1) for key, x in distinct.items()}
    targets, batch, width = distinct[id(sequences[0])].shape
    # (batch, heads, positions, width of a head)
    q, k, v = (
        projected[id(x)][part].reshape(-1, batch, heads, width // heads).permute(1, 2, 0, 3)
        for part, x in enumerate(sequences)
    )
    is_hint = is_causal and padding is None and not weights[0]
    mask = None if is_hint else _joined(pairs, padding, (batch, heads), q.dtype)
    found = None
    if weights[0]:
        scores = q @ k.transpose(2, 3) * math.sqrt(1.0 / q.shape[3])
        found = torch.softmax(scores if mask is None else scores + mask, 3)
        if dropout:
            found = F.dropout(found, dropout)
        mixed = found @ v
        if weights[1]:
            found = found.mean(1)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_hint)
    output = F.linear(mixed.permute(2, 0, 1, 3).reshape(targets, batch, width), *out_proj)
    if is_batch:
        return output, found
    return output.squeeze(1), None if found is None else found.squeeze(0)


def _joined(pairs: Tensor | None, padding: Tensor | None, sizes: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
    """Both masks as one that is added to scores of shape `(batch, heads, targets, sources)`."""
    if pairs is not None:
        pairs = _added(pairs, dtype)
        if pairs.dim() == 3:
            pairs = pairs.reshape(*sizes, *pairs.shape[1:])
    if padding is None:
        return pairs
    padding = _added(padding, dtype).reshape(sizes[0], 1, 1, -1)
    return padding if pairs is None else pairs + padding


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
