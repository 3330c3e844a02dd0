"""Checks of the network."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from trainstack.trainer import ModuleInterface
from trainstack.verifying.script_checks.evidence import Evidence, holds_generator
from trainstack.verifying.script_checks.findings import Found, check


@check("D207", "problem", "a batch norm that gets a batch of one sample")
def batch_norm_of_one(evidence: Evidence) -> Iterator[Found]:
    """In each step, or in the last step of an epoch."""
    plan, length = evidence.plan, evidence.data_length()
    norms = [
        name
        for name, part in evidence.module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and any(p.requires_grad for p in part.parameters())
    ]
    if plan is None or not norms:
        return
    if plan.micro_batch == 1:
        yield (
            f"{norms[0]} is a batch norm, and a forward pass has one sample",
            "Write a larger train_batch_size or gpu_batch_size_limit, or nn.GroupNorm instead of the batch norm.",
        )
    elif length % plan.global_batch == 1 and not evidence.loader.drop_last:
        yield (
            f"{norms[0]} is a batch norm, and the last batch of an epoch has one of {length} samples",
            "Write drop_last=True in the DataLoader, or another train_batch_size.",
            evidence.method_place("get_train_dataloader"),
        )


@check("D208", "hint", "one layer at several places of a container")
def shared_layers(evidence: Evidence) -> Iterator[Found]:
    """`[layer] * 3` and `nn.Sequential(layer, layer)` share the weights."""
    for name, part in evidence.module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential):
            continue
        trained = [one for one in part if any(p.requires_grad for p in one.parameters())]
        if len({id(one) for one in trained}) < len(trained):
            shared = next(one for one in trained if sum(one is other for other in trained) > 1)
            yield (
                f"{name or type(part).__name__} holds the same {type(shared).__name__} several times: the places "
                "share their weights",
                "Make a new layer for each place, with copy.deepcopy or a comprehension, if this is not on purpose.",
                evidence.method_place("__init__"),
            )


@check("D209", "problem", "a module without trainable parameters")
def all_frozen(evidence: Evidence) -> Iterator[Found]:
    """Nothing can be trained."""
    parameters = list(evidence.module.parameters())
    if parameters and not any(one.requires_grad for one in parameters):
        yield (
            f"all {len(parameters)} parameters are frozen (requires_grad is False)",
            "Call requires_grad_(True) on the part that is to be trained.",
            evidence.method_place("__init__"),
        )


@check("D210", "problem", "dropout that stays on in evaluation")
def dropout_in_evaluation(evidence: Evidence) -> Iterator[Found]:
    """`functional.dropout(x)` does not follow the mode of the module."""
    for call in evidence.calls:
        if "dropout" in call.name and call.stage == "val" and call.facts["training"] and call.facts["p"] > 0:
            yield (
                f"{call.name} is applied in validation as well",
                f"Write functional.{call.name}(x, p, training=self.training), or a layer such as nn.Dropout.",
                call.place,
            )


@check("D211", "hint", "state that no checkpoint keeps")
def state_outside(evidence: Evidence) -> Iterator[Found]:
    """Attributes that change in training, and are in no `state_dict` and no `get_state`."""
    if type(evidence.module).get_state is not ModuleInterface.get_state:  # it may keep them under other names
        return
    names = [name for name in evidence.changed if not _is_kept(evidence, name)]
    if names:
        yield (
            f"training changes {', '.join(names[:5])} of the module, which no checkpoint keeps: a resumed run begins "
            "with the value of __init__",
            "Return it from get_state and take it back in update_state, or register_buffer for a tensor.",
            evidence.method_place("train_step"),
        )


def _is_kept(evidence: Evidence, name: str) -> bool:
    """Whether an attribute is of the library or of torch, private, or a generator, which checkpoints keep."""
    owner, _, attribute = name.rpartition(".")
    part = dict(evidence.module.named_modules()).get(owner, evidence.module)
    classes = [kind for kind in type(part).__mro__ if kind.__module__.startswith(("trainstack.", "torch."))]
    declared = {key for kind in classes for key in (*vars(kind), *vars(kind).get("__annotations__", ()))}
    if holds_generator(getattr(part, attribute, None), 0):
        return True
    return attribute.startswith("_") or attribute in declared
