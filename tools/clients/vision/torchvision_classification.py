"""A ResNet on a dataset of torchvision, with v2 transforms and workers."""

import torch
import torchvision
from torchvision.transforms import v2

import trainstack as ts

transform = v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])

if __name__ == "__main__":
    ts.seed_everything(0)
    data = torchvision.datasets.FakeData(24, (3, 32, 32), num_classes=4, transform=transform)
    module = ts.SupervisedModule(
        torchvision.models.resnet18(num_classes=4),
        torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        "sgd",
        data,
        data,
        optimizer_kwargs={"lr": 0.01, "momentum": 0.9},
        scheduler="warmup_cosine",
        train_dataloader_kwargs={"num_workers": 2},
    )
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=2, train_batch_size=8, val_batch_size=8))
    trainer.train()
    assert trainer.global_steps_finished == 6
    assert trainer.validate()["default"]["outputs"].shape == (24, 4)
