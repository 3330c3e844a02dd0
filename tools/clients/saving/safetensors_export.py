"""safetensors' own reader opens the export and every tensor file of a checkpoint."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    inputs = torch.randn(32, 3)
    net = nn.Linear(3, 1)
    module = ts.SupervisedModule(net, nn.MSELoss(), "adam", TensorDataset(inputs, inputs.sum(1, keepdim=True)))
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=8, output_dir="run"))
    trainer.train()
    trainer.export("exported")
    (file,) = Path("exported").glob("*.safetensors")
    weights = {name.removeprefix("model."): value for name, value in load_file(file).items()}
    plain = nn.Linear(3, 1)
    plain.load_state_dict(weights)
    assert torch.equal(plain(inputs), net(inputs))
    files = list(Path("run").rglob("checkpoint-*/*.safetensors"))
    assert files
    assert all(load_file(each) is not None for each in files)
