"""`CallbackInterface`: the hooks a module may override. All do nothing by default."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class CallbackInterface:
    """Hooks around the loop.

    Outputs reach a hook only if it asks for them: a hook without `*outputs` in its signature costs no memory.
    Outputs are detached; those of a step lie on the training device, those of an epoch on the CPU.
    """

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        """Before the first batch of an epoch.

        Args:
            global_step: global steps finished so far.
            epoch: counted from 0.
        """

    def on_end_backward(self, global_step: int, loss_tensor: Tensor) -> None:
        """After the backward pass of each micro-batch.

        Args:
            global_step: number of the step under way, counted from 1.
            loss_tensor: the micro-batch's loss, 0-dim, neither scaled nor detached; its graph is freed.
        """

    def on_end_train_step(self, global_step: int, *train_step_collated_outputs: Any) -> None:
        """After each global step, when the weights have moved.

        Args:
            global_step: global steps finished, this one included.
            *train_step_collated_outputs: what `train_step` returned for the micro-batches of this step on this
                process, item by item, joined along dimension 0; a dict arrives as one dict.
        """

    def on_end_train_epoch(self, global_step: int, *train_step_collated_outputs: Any) -> None:
        """After the last step of an epoch and before validation; outputs as above, over the whole epoch."""

    def on_end_val_epoch(self, global_step: int, *val_step_collated_outputs: Any, key: str = "default") -> None:
        """After each validation loader.

        Args:
            global_step: global steps finished so far.
            *val_step_collated_outputs: what `val_step` returned, item by item, in data set order.
            key: the loader's key in the dict that `get_val_dataloaders` returned; "default" for a single loader.
        """

    def on_end_train(self, global_step: int) -> None:
        """Once, after the last epoch and its checkpoint."""
