"""`FrozenWeights` finds the frozen weights that a checkpoint can leave out, and puts them back into its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainstack._tensor_classes import is_sharded
from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.core.fingerprints import checksums
from trainstack.trainer.core.module_extras import without_wrappers

Digests = Mapping[str, str]


class FrozenWeights:
    """Frozen parameters that have the values that the module of a new process has.

    A parameter that was trained, or changed otherwise, has another value than at the beginning, also if it is frozen
    now. So only a comparison of values tells which ones can be left out.

    Args:
        module: its `get_state` names the tensors.

    Attributes:
        has_completed: whether the run has resumed from a checkpoint without frozen weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._at_start: Digests = {}
        self.has_completed: bool = False

    def get_digests(self) -> dict[str, str]:
        """The digests of all parameters in the module's state, by their names there."""
        state = self._module.get_state()  # type: ignore[operator]
        return _digests({name: state[name] for name in self._parameters_in(state)})

    def begin(self, digests: Digests) -> None:
        """`digests` are those of the values that a new process makes, on rank 0; later ones do not count."""
        self._at_start = self._at_start or digests

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """What a checkpoint keeps of the module's `state`, and the digests of what it leaves out."""
        if not self._at_start:
            return state, {}
        owners = self._parameters_in(state).items()
        frozen = [name for name, owner in owners if not owner.requires_grad and name in self._at_start]
        digests = _digests({name: state[name] for name in frozen if not is_sharded(state[name])})
        left_out = {name: digest for name, digest in digests.items() if digest == self._at_start[name]}
        return {name: value for name, value in state.items() if name not in left_out}, left_out

    def check(self, left_out: Digests, digests: Digests) -> None:
        """Refuse a module that does not have the weights that a checkpoint leaves out.

        Args:
            left_out: from the checkpoint.
            digests: of the module of now.

        Raises:
            CheckpointMismatchError: naming those that differ.
        """
        differing = [name for name, digest in left_out.items() if digests.get(name) != digest]
        if not differing:
            return
        name = differing[0]
        raise CheckpointMismatchError(
            f"the checkpoint was written with keep_frozen=False and leaves out {len(left_out)} frozen tensors, and "
            f"{len(differing)} of them differ in {type(self._module).__name__}: {', '.join(differing[:4])}"
            f"{', ...' if len(differing) > 4 else ''}. {name} was {left_out[name]}, and is "
            f"{digests.get(name, 'not there')}. Build the module with the weights that the run began with, such as "
            "by from_pretrained, or name them in init_weights_from."
        )

    def complete(self, state: Mapping[str, Any], left_out: Digests) -> dict[str, Any]:
        """The `state` of a checkpoint with the module's own parameters in the place of those that it leaves out.

        Entries below the name of a quantized parameter are not taken by `load_state_dict`, and belong to its value.
        """
        self.has_completed, own = True, self._module.get_state()  # type: ignore[operator]
        return {**{name: own[name] for name in self._parameters() if name in left_out and name in own}, **state}

    def _parameters(self) -> dict[str, Tensor]:
        named = self._module.named_parameters(remove_duplicate=False)
        return {without_wrappers(name): parameter for name, parameter in named}

    def _parameters_in(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """By names in `state`, the parameters that are there, or to whose value an entry belongs, such as a scale."""
        parameters = self._parameters()
        owners: dict[str, Tensor] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor) or is_lazy(value) or value.is_meta:
                continue
            owner = name  # a quantized parameter has entries below its name
            while owner and owner not in parameters:
                owner = owner.rpartition(".")[0]
            if owner:
                owners[name] = parameters[owner]
        return owners


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {number % 2**64:016x}"
        for (name, tensor), number in zip(tensors.items(), checksums(tensors.values()), strict=True)
    }
