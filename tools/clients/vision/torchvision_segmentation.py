"""A segmentation network that returns {"out", "aux"}, with a loss over both."""

import torch
import torchvision
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import trainstack as ts


def loss(outputs, target):
    return cross_entropy(outputs["out"], target) + 0.4 * cross_entropy(outputs["aux"], target)


if __name__ == "__main__":
    ts.seed_everything(0)
    images, masks = torch.rand(4, 3, 32, 32), torch.randint(0, 3, (4, 32, 32))

    class Segmentation(ts.ModuleInterface):
        def __init__(self):
            super().__init__()
            self.model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
                weights=None, weights_backbone=None, num_classes=3
            )
            self.aux = torch.nn.Conv2d(3, 3, 1)

        def get_train_dataloader(self, sampler, batch_size):
            return self.build_dataloader(TensorDataset(images, masks), sampler, batch_size)

        get_val_dataloaders = get_train_dataloader

        def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
            return torch.optim.AdamW(self.parameters(), lr=1e-3), None

        def train_step(self, global_step, batch, device):
            out = self.model(batch[0])["out"]
            return loss({"out": out, "aux": self.aux(out)}, batch[1])

        def val_step(self, global_step, batch, device):
            out = self.model(batch[0])["out"]
            return {"loss": cross_entropy(out, batch[1]), "masks": out.argmax(1)}

    trainer = ts.Trainer(Segmentation(), ts.TrainerArguments(epochs=2, train_batch_size=2, val_batch_size=2))
    trainer.train()
    assert trainer.validate()["default"]["masks"].shape == (4, 32, 32)

    # The network without a custom class: `out` is the `input` of the loss.
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    )
    module = ts.SupervisedModule(
        model, cross_entropy, "adamw", TensorDataset(images, masks), output_mapping=lambda outputs: outputs["out"]
    )
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=2))
    trainer.train()
    assert trainer.global_steps_finished == 2
