"""LoRA over a base that torchao has quantised to 8 bits (QLoRA's form), and an exact resume."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import TensorDataset
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import trainstack as ts


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())


def train(epochs, folder):
    ts.seed_everything(0)
    data = TensorDataset(torch.randn(16, 16), torch.randint(0, 2, (16,)))
    net = Net().requires_grad_(False)
    quantize_(net, Int8WeightOnlyConfig(version=2))
    net = get_peft_model(net, LoraConfig(r=2, target_modules=["first", "second"]))
    module = ts.SupervisedModule(net, nn.CrossEntropyLoss(), "adamw", data)
    args = ts.TrainerArguments(epochs=epochs, train_batch_size=8, output_dir=folder, resume="auto")
    ts.Trainer(module, args).train()
    return {name: value for name, value in net.state_dict().items() if "lora" in name}


if __name__ == "__main__":
    whole = train(2, "whole")
    train(1, "parts")
    resumed = train(2, "parts")
    assert whole
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
