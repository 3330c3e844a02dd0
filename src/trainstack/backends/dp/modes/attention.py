"""Self-attention as `nn.MultiheadAttention` computes it, spelled out so that its two linear maps can be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def self_attention(
    linear: Linear,
    query: Tensor,
    heads: int,
    in_proj: tuple[Tensor, Tensor | None],
    out_proj: tuple[Tensor, Tensor | None],
    dropout: float,
    masks: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """What `F.multi_head_attention_forward` returns first where query, key and value are the same.

    Args:
        linear: called for both projections, on `(records, positions, width)`.
        query: `(positions, records, width)`.
        heads: how many.
        in_proj, out_proj: weight and bias of the projections.
        dropout: of the attention weights.
        masks: of pairs of positions, `(positions, positions)` or that for each record and head; and of the positions of
            each record, `(records, positions)`; True or -inf where not to look.
    """
    positions, records, width = query.shape
    projected = linear(query.transpose(0, 1), *in_proj)
    q, k, v = projected.reshape(records, positions, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    pairs, padding = (_added(mask, q) for mask in masks)
    if pairs is not None and pairs.dim() == 3:
        pairs = pairs.reshape(records, heads, positions, positions)
    if padding is not None:
        padding = padding[:, None, None, :]
        pairs = padding if pairs is None else pairs + padding
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=pairs, dropout_p=dropout)
    return linear(mixed.transpose(1, 2).reshape(records, positions, width), *out_proj).transpose(0, 1)


def is_plain(
    query: Tensor, key: Tensor, value: Tensor, bias_k: Any, add_zero_attn: bool, options: dict[str, Any]
) -> bool:
    """Whether a call of `F.multi_head_attention_forward` is plain self-attention without returned weights."""
    special = bias_k is not None or add_zero_attn or options.get("use_separate_proj_weight")
    given = options.get("static_k") is not None or options.get("static_v") is not None
    return query is key is value and query.dim() == 3 and not (special or given or options.get("need_weights", True))


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask as what is added to scores."""
    if mask is None or mask.dtype is not torch.bool:
        return None if mask is None else mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
