"""Quantisation-aware training with torchao: prepare, train, convert."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(net, QATConfig(config, step="prepare"))
    data = TensorDataset(torch.randn(16, 32), torch.randint(0, 2, (16,)))
    module = ts.SupervisedModule(net, nn.CrossEntropyLoss(), "adamw", data, data, optimizer_kwargs={"lr": 0.01})
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=4, train_batch_size=8, val_batch_size=8))
    trainer.train()
    quantize_(net, QATConfig(config, step="convert"))
    assert net(torch.randn(2, 32)).shape == (2, 2)
    losses = trainer.history.get_metric_values("val/loss")
    assert losses[-1] < losses[0]
