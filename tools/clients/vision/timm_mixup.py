"""timm's Mixup on the batch in `train_step`, with its soft-target loss."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch.utils.data import TensorDataset

import trainstack as ts


class Mixed(ts.SupervisedModule):
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=5)

    def train_step(self, global_step, batch, device):
        images, soft = self.mixup(*batch)
        assert soft.shape == (len(images), 5)
        return SoftTargetCrossEntropy()(self.model(images), soft)


def train():
    ts.seed_everything(0)
    data = TensorDataset(torch.rand(16, 3, 32, 32), torch.randint(0, 5, (16,)))
    model = timm.create_model("mobilenetv3_small_050", num_classes=5)
    # timm's Mixup uses the device of the batch only with this option, which the CPU needs.
    Mixed.mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=5)
    trainer = ts.Trainer(
        Mixed(model, torch.nn.CrossEntropyLoss(), "adamw", data, data), ts.TrainerArguments(train_batch_size=8)
    )
    trainer.train()
    return trainer.history.get_metric_values("train/loss_epoch")


if __name__ == "__main__":
    assert train() == train()
