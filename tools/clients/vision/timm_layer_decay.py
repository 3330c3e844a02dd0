"""Layer decay of timm's fine-tuning: parameter groups with their own learning rates."""

import timm
import torch
from timm.optim import param_groups_layer_decay
from torch.utils.data import TensorDataset

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, depth=3, num_classes=4)
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    for group in groups:
        group["lr"] = 1e-3 * group["lr_scale"]
    data = TensorDataset(torch.rand(16, 3, 32, 32), torch.randint(0, 4, (16,)))
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    module = ts.SupervisedModule(model, torch.nn.CrossEntropyLoss(), optimizer, data)
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=8, log_every=1))
    trainer.train()
    rates = {trainer.history.get_latest_metric(f"lr/{i}") for i in range(len(groups))}
    assert max(rates) == 1e-3
    assert len(rates) == 5  # embedding, three blocks, head
