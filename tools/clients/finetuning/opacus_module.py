"""A network that opacus has converted for private training, with "sp-dp"."""

import torch
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts
from trainstack import DifferentialPrivacyArguments

if __name__ == "__main__":
    ts.seed_everything(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    net = ModuleValidator.fix(net)  # batch norm becomes group norm
    assert not ModuleValidator.validate(net, strict=False)
    data = TensorDataset(torch.rand(64, 1, 8, 8), torch.randint(0, 2, (64,)))
    module = ts.SupervisedModule(net, nn.CrossEntropyLoss(), "sgd", data, optimizer_kwargs={"lr": 0.1})
    private = DifferentialPrivacyArguments(noise_multiplier=1.0, delta=1e-3)
    args = ts.TrainerArguments(backend="sp-dp", train_batch_size=8, differential_privacy_args=private)
    trainer = ts.Trainer(module, args)
    trainer.train()
    assert trainer.global_steps_finished == 8
