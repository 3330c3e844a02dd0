"""A network is initialised and loaded with Accelerate, then trained."""

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    save_file(nn.Linear(3, 1).state_dict(), "weights.safetensors")
    with init_empty_weights():
        net = nn.Linear(3, 1)
    net = load_checkpoint_and_dispatch(net, "weights.safetensors", device_map={"": "cpu"})
    inputs = torch.randn(32, 3)
    data = TensorDataset(inputs, inputs[:, :1])
    trainer = ts.Trainer(ts.SupervisedModule(net, nn.MSELoss(), "sgd", data), ts.TrainerArguments(train_batch_size=8))
    trainer.train()
    assert trainer.global_steps_finished == 4
    assert not any(p.is_meta for p in net.parameters())
