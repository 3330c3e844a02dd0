"""LoRA without `task_type` on a timm model and on a custom network, with dict batches."""

import timm
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import trainstack as ts


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)

    def forward(self, pixels, scale=1.0):
        return self.first(pixels) * scale


if __name__ == "__main__":
    ts.seed_everything(0)
    rows = [{"pixels": torch.rand(4), "target": i % 8, "name": str(i)} for i in range(8)]
    net = get_peft_model(Net(), LoraConfig(r=2, target_modules=["first"]))
    module = ts.SupervisedModule(net, nn.functional.cross_entropy, "adamw", rows, optimizer_kwargs={"lr": 0.01})
    ts.Trainer(module, ts.TrainerArguments(train_batch_size=4)).train()

    images = [{"x": torch.rand(3, 32, 32), "target": i % 4} for i in range(8)]
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=4)
    vit = get_peft_model(vit, LoraConfig(r=2, target_modules=["qkv"], modules_to_save=["head"]))
    module = ts.SupervisedModule(vit, nn.functional.cross_entropy, "adamw", images)
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=4))
    trainer.train()
    assert trainer.global_steps_finished == 2
