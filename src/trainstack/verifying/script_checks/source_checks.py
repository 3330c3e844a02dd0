"""Checks of the text of a script and of calls that wait for the device."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from trainstack.verifying.script_checks.evidence import Evidence
from trainstack.verifying.script_checks.findings import Found, check

_PRINTS = ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__")


@check("D603", "problem", "a device that is written into the code")
def fixed_device(evidence: Evidence) -> Iterator[Found]:
    """`.cuda()`, `.to("cuda")` and `device="cuda"` in the module fail on machines without it."""
    for node in _nodes_of_module(evidence):
        if isinstance(node, ast.Call) and _names_device(node):
            assert evidence.source is not None
            yield (
                f"{ast.unparse(node)[:60]} names a device",
                "Remove it: the trainer moves module and batches. For new tensors write device=device, the argument "
                "of the step.",
                evidence.source.place(node),
            )


def _names_device(node: ast.Call) -> bool:
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method == "cuda" and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "torch":
        return True
    given = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
    given += node.args[:1] if method in ("to", "device") else []
    return any(isinstance(one, ast.Constant) and str(one.value).startswith(("cuda", "mps")) for one in given)


def _nodes_of_module(evidence: Evidence) -> Iterator[ast.AST]:
    """The nodes of the class of the module, in the user's file."""
    if evidence.source is None:
        return
    names = {kind.__name__ for kind in type(evidence.module).__mro__}
    names |= {type(part).__name__ for part in evidence.module.modules()}
    for statement in evidence.source.tree.body:
        if isinstance(statement, ast.ClassDef) and statement.name in names:
            yield from ast.walk(statement)


@check("D604", "hint", "a batch that is moved by hand")
def moved_by_hand(evidence: Evidence) -> Iterator[Found]:
    """The trainer moves the tensors of a batch before the step."""
    source = evidence.source
    if source is None:
        return
    steps = ("train_step", "val_step", "test_step", "predict_step")
    for function in (node for node in _nodes_of_module(evidence) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function) if function.name in steps else ():
            moves = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"
            if moves and isinstance(node, ast.Call) and any(ast.unparse(one) == "device" for one in node.args):
                of_batch = isinstance(node.func, ast.Attribute) and "batch" in ast.unparse(node.func.value)
                if of_batch:
                    yield (
                        f"{ast.unparse(node)[:60]} moves a part of the batch",
                        "Remove it: the tensors of the batch are on the device already.",
                        source.place(node),
                    )


@check("D605", "hint", "a read of a value in train_step, which waits for the device")
def waits(evidence: Evidence) -> Iterator[Found]:
    """`.item()`, `.cpu()`, `.numpy()`, `float(loss)` and `if loss > 1`."""
    for call in evidence.calls:
        if call.name in _PRINTS and call.stage == "train" and call.facts["has_graph"] and call.place:
            shown = {"__float__": "float()", "__int__": "int()", "__bool__": "if"}.get(call.name, f"{call.name}()")
            yield (
                f"{shown} of a computed tensor waits for the device in each step",
                "Pass the tensor to self.log(name, value), which reads it at the next log point.",
                call.place,
            )


@check("D606", "hint", "a training that begins when the file is imported")
def trains_on_import(evidence: Evidence) -> Iterator[Found]:
    """Loader workers, launched processes and this command import the file."""
    source = evidence.source
    node = None if source is None else source.calls_train_unguarded()
    if source is not None and node is not None:
        yield (
            "the file trains when it is imported, which loader workers and launched processes do",
            'Put the code below if __name__ == "__main__":.',
            source.place(node),
        )


@check("D607", "problem", "torch.no_grad or torch.inference_mode around train_step")
def without_gradients(evidence: Evidence) -> Iterator[Found]:
    """A decorator that was copied from an evaluation."""
    step = inspect.unwrap(type(evidence.module).train_step)
    source = evidence.source
    for node in _nodes_of_module(evidence):
        if isinstance(node, ast.FunctionDef) and node.name == step.__name__ == "train_step" and source is not None:
            for one in node.decorator_list:
                if any(name in ast.unparse(one) for name in ("no_grad", "inference_mode")):
                    yield (
                        f"train_step is decorated with {ast.unparse(one)}, so no gradient is computed",
                        "Remove the decorator. The trainer switches gradients off for val_step itself.",
                        source.place(one),
                    )
