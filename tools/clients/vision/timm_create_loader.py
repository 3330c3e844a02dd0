"""The loader of timm's training script with its sampler, collation and normalisation."""

import timm
import torch
from timm.data import create_loader
from torchvision.datasets import FakeData

import trainstack as ts


class Classifier(ts.SupervisedModule):
    def get_train_dataloader(self, sampler, batch_size):
        return create_loader(
            self.train_dataset,
            input_size=(3, 32, 32),
            batch_size=batch_size,
            is_training=True,
            use_prefetcher=False,
            num_workers=0,
            auto_augment="rand-m3-mstd0.5",
        )


if __name__ == "__main__":
    ts.seed_everything(0)
    model = timm.create_model("mobilenetv3_small_050", num_classes=4)
    module = Classifier(model, torch.nn.CrossEntropyLoss(), "adamw", FakeData(20, (3, 40, 40), num_classes=4))
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=2, train_batch_size=8))
    trainer.train()
    assert trainer.global_steps_finished == 4  # timm drops the last batch of 4
