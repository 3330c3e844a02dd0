"""CutMix and MixUp in the collate function of the training loader, as in the gallery of torchvision."""

import torch
import torchvision
from torch.utils.data import default_collate
from torchvision.transforms import v2

import trainstack as ts

mix = v2.RandomChoice([v2.CutMix(num_classes=4), v2.MixUp(num_classes=4)])


def collate_fn(samples):
    return mix(*default_collate(samples))


def train():
    ts.seed_everything(0)
    data = torchvision.datasets.FakeData(24, (3, 32, 32), num_classes=4, transform=v2.PILToTensor())
    data.transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    module = ts.SupervisedModule(
        torchvision.models.mobilenet_v3_small(num_classes=4),
        torch.nn.CrossEntropyLoss(),  # accepts classes and probabilities
        "adamw",
        data,
        data,
        train_dataloader_kwargs={"collate_fn": collate_fn},
    )
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=8, val_batch_size=8))
    trainer.train()
    assert trainer.validate()["default"]["targets"].shape == (24,)  # classes: validation does not mix
    return trainer.history.get_metric_values("train/loss_epoch")


if __name__ == "__main__":
    assert train() == train()  # the mix depends only on the seed
