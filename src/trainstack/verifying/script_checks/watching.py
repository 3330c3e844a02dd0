"""`CallWatch` notes calls of torch whose arguments tell of a mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trainstack.verifying.script_checks.evidence import Call, LayerInput
from trainstack.verifying.script_checks.sources import user_place

_LOSSES = {
    getattr(functional, name): name
    for name in (
        "cross_entropy",
        "nll_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
    )
}
_DROPOUTS = {
    getattr(functional, name): name for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
}
_WAITS = {
    getattr(Tensor, name): name for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
}
_NORMALIZED = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid"}
# torch 2.13.0: names of autograd nodes that pass values on in another form.
_PASSES_ON = {"View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "ToCopy", "Clone", "Alias"}
_PASSES_ON |= {"Transpose", "Permute", "T", "Flatten", "Expand"}
_MOST_CALLS = 200


class CallWatch(TorchFunctionMode):
    """A block in which calls of losses, dropout and reads of values are noted.

    Attributes:
        calls: each kind of call once for each place and stage.
        stage: `"train"`, `"val"`, or "" outside of steps, where nothing is noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.stage = ""
        self._seen = set[tuple[str, str, str]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call, and make it."""
        kwargs = kwargs or {}
        if self.stage:
            with suppress(TypeError):  # a function without a hash
                name = _LOSSES.get(func)
                if name is not None:
                    self._note(name, _loss_facts, args, kwargs)
                elif func in _DROPOUTS:
                    self._note(_DROPOUTS[func], _dropout_facts, args, kwargs)
                elif func in _WAITS and self.stage == "train":
                    has_graph = bool(args and isinstance(args[0], Tensor) and args[0].grad_fn is not None)
                    self._note(_WAITS[func], lambda *_: {"has_graph": has_graph}, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, name: str, facts: Callable[[Any, Any], dict[str, Any]], args: Any, kwargs: Any) -> None:
        place = user_place(3)
        key = (name, place, self.stage)
        if key not in self._seen and len(self._seen) < _MOST_CALLS:
            self._seen.add(key)
            self.calls.append(Call(name, place, self.stage, facts(args, kwargs)))


def _loss_facts(args: Any, kwargs: Any) -> dict[str, Any]:
    given = dict(zip(("input", "target"), args, strict=False)) | kwargs
    scores, target = given.get("input"), given.get("target")
    if not isinstance(scores, Tensor) or not isinstance(target, Tensor):
        return {}
    values = scores.detach().float()
    return {
        "input_shape": tuple(scores.shape),
        "target_shape": tuple(target.shape),
        "target_dtype": target.dtype,
        "normalized_by": _normalized_by(scores),
        "high": float(values.max()) if values.numel() else 0.0,
        "low": float(values.min()) if values.numel() else 0.0,
        "one_hot": _is_one_hot(target),
        "target_low": float(target.min()) if target.numel() else 0.0,
        "target_high": float(target.max()) if target.numel() else 0.0,
        "ignore_index": given.get("ignore_index", -100),
    }


def _normalized_by(scores: Tensor) -> str:
    """The name of the function that has made `scores` probabilities or their logarithms; "" for others."""
    node: Any = scores.grad_fn
    for _ in range(20):
        if node is None:
            return ""
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        if name in _NORMALIZED:
            return _NORMALIZED[name]
        if name not in _PASSES_ON:
            return ""
        node = node.next_functions[0][0] if node.next_functions else None
    return ""


def _is_one_hot(target: Tensor) -> bool:
    if target.dim() < 2 or target.shape[1] < 2 or not target.numel():
        return False
    values = target.detach().float()
    return bool(((values == 0) | (values == 1)).all() and (values.sum(1) == 1).all())


def _dropout_facts(args: Any, kwargs: Any) -> dict[str, Any]:
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    return {"p": float(given.get("p", 0.5)), "training": bool(given.get("training", True))}


class FirstLayer:
    """Notes the input of the first layer with weights that a forward pass calls.

    Attributes:
        seen: its input; None before.
    """

    def __init__(self, module: nn.Module) -> None:
        self.seen: LayerInput | None = None
        self._handles = [
            part.register_forward_pre_hook(self._hook(name))
            for name, part in module.named_modules()
            if isinstance(part, nn.Linear | nn.modules.conv._ConvNd) and type(part).__module__.startswith("torch.")
        ]

    def _hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def note(part: nn.Module, args: Any) -> None:
            given = args[0] if args else None
            if self.seen is None and isinstance(given, Tensor) and given.numel() and given.is_floating_point():
                values = given.detach().float()
                whole = bool((values == values.round()).all()) if given.grad_fn is None else False
                self.seen = LayerInput(name, float(values.min()), float(values.max()), whole, tuple(given.shape))

        return note

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def largest_gradients(module: nn.Module) -> Iterator[tuple[str, float]]:
    """The largest absolute value of each gradient, by the name of the parameter."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is torch.strided and parameter.grad.numel():
            yield name, float(parameter.grad.detach().abs().max())
