"""`FrozenWeights` finds frozen weights that a checkpoint can omit, and inserts them when the run resumes."""

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
    """Frozen parameters that still have the values of a newly built module.

    A frozen parameter may have been trained or changed before it was frozen. Therefore only a comparison of values
    decides which parameters a checkpoint can omit.

    Args:
        module: module whose `get_state` names the tensors.

    Attributes:
        has_completed: whether the run has resumed from a checkpoint without frozen weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._at_start: Digests = {}
        self.has_completed: bool = False

    def get_digests(self) -> dict[str, str]:
        """Return the digests of all parameters in the module's state, by their names in the state."""
        state = self._module.get_state()  # type: ignore[operator]
        return _digests({name: state[name] for name in self._parameters_in(state)})

    def begin(self, digests: Digests) -> None:
        """Set the digests of the initial values on rank 0; later calls have no effect."""
        self._at_start = self._at_start or digests

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Split the module's `state` into the part that a checkpoint keeps and the digests of the omitted tensors."""
        if not self._at_start:
            return state, {}
        owners = self._parameters_in(state).items()
        frozen = [name for name, owner in owners if not owner.requires_grad and name in self._at_start]
        digests = _digests({name: state[name] for name in frozen if not is_sharded(state[name])})
        left_out = {name: digest for name, digest in digests.items() if digest == self._at_start[name]}
        return {name: value for name, value in state.items() if name not in left_out}, left_out

    def check(self, left_out: Digests, digests: Digests) -> None:
        """Check that the module has the weights that a checkpoint omits.

        Args:
            left_out: digests from the checkpoint.
            digests: digests of the current module.

        Raises:
            CheckpointMismatchError: digests differ; it names the tensors.
        """
        differing = [name for name, digest in left_out.items() if digests.get(name) != digest]
        if not differing:
            return
        name = differing[0]
        raise CheckpointMismatchError(
            f"the checkpoint was written with keep_frozen=False and omits {len(left_out)} frozen tensors, and "
            f"{len(differing)} of them differ in {type(self._module).__name__}: {', '.join(differing[:4])}"
            f"{', ...' if len(differing) > 4 else ''}. {name} was {left_out[name]}, and is "
            f"{digests.get(name, 'not there')}. Build the module with the weights that the run began with, such as "
            "by from_pretrained, or name them in init_weights_from."
        )

    def complete(self, state: Mapping[str, Any], left_out: Digests) -> dict[str, Any]:
        """Return `state` of a checkpoint, with the module's own parameters in place of the omitted ones.

        Entries below the name of a quantized parameter are not added: they are part of its value, and
        `load_state_dict` does not take them.
        """
        self.has_completed, own = True, self._module.get_state()  # type: ignore[operator]
        return {**{name: own[name] for name in self._parameters() if name in left_out and name in own}, **state}

    def _parameters(self) -> dict[str, Tensor]:
        named = self._module.named_parameters(remove_duplicate=False)
        return {without_wrappers(name): parameter for name, parameter in named}

    def _parameters_in(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Map names in `state` to parameters; an entry such as a scale maps to the parameter that it belongs to."""
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
