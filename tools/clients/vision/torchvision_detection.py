"""Detection: lists of images and targets, and a dict of losses in training mode."""

import torch
import torchvision

import trainstack as ts


class Boxes:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        target = {"boxes": torch.tensor([[4.0, 4.0, 20.0, 24.0]]), "labels": torch.tensor([1])}
        return torch.rand(3, 32 + 8 * (index % 2), 32, generator=generator), target


class Detector(ts.ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=2
        )

    def get_train_dataloader(self, sampler, batch_size):
        return self.build_dataloader(
            Boxes(), sampler, batch_size, collate_fn=lambda rows: tuple(zip(*rows, strict=True))
        )

    get_val_dataloaders = get_train_dataloader

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9), None

    def train_step(self, global_step, batch, device):
        images, targets = batch
        losses = self.model(list(images), list(targets))
        return {"loss": sum(losses.values()), **{name: loss.detach() for name, loss in losses.items()}}

    def val_step(self, global_step, batch, device):
        images, _ = batch
        return {"found": [len(each["boxes"]) for each in self.model(list(images))]}


if __name__ == "__main__":
    ts.seed_everything(0)
    trainer = ts.Trainer(Detector(), ts.TrainerArguments(epochs=1, train_batch_size=2, val_batch_size=2))
    trainer.train()
    assert trainer.global_steps_finished == 2
    assert sum(map(len, trainer.validate()["default"]["found"])) == 4  # a list for each batch
