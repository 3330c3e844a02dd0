"""`TensorDigest` computes a short digest of the bits of many tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_not

import torch
from torch import Tensor

from trainstack._tensor_bytes import bytes_of

FOLD = 509
"""Columns into which the 64-bit words of a tensor are folded. A prime, so that rows of a weight that change places do
not meet in the same columns."""

Form = tuple[str, torch.Size, torch.dtype, torch.device]
_Key = tuple[int, int, torch.Size, torch.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The memory of one tensor, without a copy: words in rows of `FOLD`, which are summed, and the rest."""

    key: _Key
    size: int
    folded: tuple[Tensor, ...]
    whole: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The places of each tensor's numbers in a digest: first small tensors whole, then the sums, for each device."""

    words: list[_Words]
    forms: tuple[Form, ...]
    places: tuple[tuple[slice, ...], ...]
    parts: Mapping[torch.device, tuple[list[Tensor], list[Tensor]]]


class TensorDigest:
    """The digest of named tensors: for each a vector of at most `2 * FOLD + 7` numbers.

    A tensor of up to `2 * FOLD` words of 64 bits is in the digest bit by bit. Of a larger one the digest has the sums
    of the words in each of `FOLD` columns, modulo 2^64. A change of one word always changes a sum, and two values that
    change places change two sums, unless both are in the same column. The digest reads memory and not `_version`, so
    it sees writes by `.data`, `.numpy()` and another storage.

    The sums stay on the device of the tensors, and no value is read here.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Words] = {}
        self._last: _Layout | None = None

    @torch.no_grad()
    def compute(self, tensors: Mapping[str, Tensor]) -> Digest:
        """The digest of `tensors` at this moment."""
        known, words = self._known, list[_Words]()
        for name, tensor in tensors.items():
            found = known.get(name)
            key = (id(tensor), tensor.data_ptr(), tensor.shape, tensor.dtype)
            words.append(found if found is not None and found.key == key else self._look_at(name, tensor, key))
        last = self._last
        if last is None or len(last.words) != len(words) or any(map(is_not, last.words, words)):
            last = self._last = _layout(tensors, words)
        sums = {
            device: torch.cat([*whole, *[part.sum(0) for part in folded]])
            for device, (whole, folded) in last.parts.items()
        }
        return Digest(forms=last.forms, places=last.places, sums=sums)

    def _look_at(self, name: str, tensor: Tensor, key: _Key) -> _Words:
        flat, is_view = _flat(tensor.detach())
        found = _split(key, flat)
        if is_view:  # which keeps the memory, so that nothing else gets its address
            self._known[name] = found
        else:
            self._known.pop(name, None)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Digest:
    """A result of `TensorDigest.compute`.

    Attributes:
        forms: name, shape, dtype and device of each tensor.
        places: for each tensor, in the same order, the places of its numbers in `sums`.
        sums: int64, one vector a device.
    """

    forms: tuple[Form, ...]
    places: tuple[tuple[slice, ...], ...]
    sums: Mapping[torch.device, Tensor]

    def differs(self, other: Digest) -> Tensor | bool:
        """Whether `other` is of other values: a 0-dim bool, read by the caller; False and True are known already."""
        if (self.forms is not other.forms and self.forms != other.forms) or self.sums.keys() != other.sums.keys():
            return True
        found: Tensor | bool = False
        for device, sums in self.sums.items():
            if device.type == "cpu":  # nothing to wait for
                if not torch.equal(sums, other.sums[device]):
                    return True
            else:
                here = (sums != other.sums[device]).any()
                found = here if isinstance(found, bool) else found | here.to(found.device)
        return found

    def changed(self, other: Digest) -> list[str]:
        """The names of the tensors that `other` has with another value, without or beyond these."""
        mine, its = self._by_form(), other._by_form()
        missing = [form[0] for form in {**mine, **its} if form not in mine or form not in its]
        same = (form for form in mine if form in its)
        return list(dict.fromkeys([*missing, *(form[0] for form in same if not torch.equal(mine[form], its[form]))]))

    def _by_form(self) -> dict[Form, Tensor]:
        return {
            form: torch.cat([self.sums[form[3]][place] for place in places])
            for form, places in zip(self.forms, self.places, strict=True)
            if places
        }


def _layout(tensors: Mapping[str, Tensor], words: list[_Words]) -> _Layout:
    parts: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for one, tensor in zip(words, tensors.values(), strict=True):
        if one.size:
            whole, folded = parts.setdefault(tensor.device, ([], []))
            whole += one.whole
            folded += one.folded
    at = {device: [0, sum(part.numel() for part in whole)] for device, (whole, _) in parts.items()}
    places = []
    for one, tensor in zip(words, tensors.values(), strict=True):
        found = []
        for kind, count in ((0, one.size - FOLD * len(one.folded)), (1, FOLD * len(one.folded))):
            if count:
                start = at[tensor.device][kind]
                found.append(slice(start, start + count))
                at[tensor.device][kind] += count
        places.append(tuple(found))
    forms = tuple((name, *one.key[2:], t.device) for (name, t), one in zip(tensors.items(), words, strict=True))
    return _Layout(words=words, forms=forms, places=tuple(places), parts=parts)


def _flat(tensor: Tensor) -> tuple[Tensor, bool]:
    """The elements of `tensor` in the order of its memory, 1-dim, and whether they are a view of it."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    ordered = tensor.permute(order)  # a channels-last weight is contiguous in this order
    is_view = ordered.is_contiguous() and ordered.storage_offset() * ordered.element_size() % 8 == 0
    return (ordered if is_view else tensor.clone(memory_format=torch.contiguous_format)).reshape(-1), is_view


def _split(key: _Key, flat: Tensor) -> _Words:
    data = bytes_of(flat)
    count = data.numel() // 8
    words, rest = data[: 8 * count].view(torch.int64), data[8 * count :]
    summed = count - count % FOLD if count > 2 * FOLD else 0
    whole = tuple(part for part in (words[summed:], rest) if part.numel())
    folded = (words[:summed].view(-1, FOLD),) if summed else ()
    return _Words(key=key, size=sum(part.numel() for part in whole) + len(folded) * FOLD, folded=folded, whole=whole)
