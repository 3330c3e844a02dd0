"""torch.export of the trained network, and its weights through torch.distributed.checkpoint."""

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model, save_model
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    inputs = torch.randn(32, 3)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    module = ts.SupervisedModule(net, nn.MSELoss(), "sgd", TensorDataset(inputs, inputs[:, :1]))
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=8, output_dir="run"))
    trainer.train()
    exported = torch.export.export(net.eval(), (inputs[:2],))
    torch.testing.assert_close(exported.module()(inputs[:2]), net(inputs[:2]))
    dcp.save(module.get_state(), checkpoint_id="dcp")
    state = {name: torch.zeros_like(value) for name, value in module.get_state().items()}
    dcp.load(state, checkpoint_id="dcp")
    assert all(torch.equal(value, module.get_state()[name]) for name, value in state.items())
    save_model(net, "net.safetensors")
    load_model(net, "net.safetensors")
