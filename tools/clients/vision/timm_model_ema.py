"""`callbacks.EMA` instead of timm's ModelEmaV3: the same averaged weights."""

import copy

import timm
import torch
from timm.utils import ModelEmaV3
from torch.utils.data import TensorDataset

import trainstack as ts


class TimmEma(ts.Callback):
    def on_train_begin(self, trainer):
        self.ema = ModelEmaV3(trainer.module.model, decay=0.9)

    def on_train_step_end(self, trainer, step):
        self.ema.update(trainer.module.model)


if __name__ == "__main__":
    ts.seed_everything(0)
    data = TensorDataset(torch.rand(16, 3, 32, 32), torch.randint(0, 4, (16,)))
    model = timm.create_model("resnet10t", num_classes=4)
    start = copy.deepcopy(model.state_dict())
    timms = TimmEma()
    module = ts.SupervisedModule(model, torch.nn.CrossEntropyLoss(), "sgd", data, optimizer_kwargs={"lr": 0.1})
    own = ts.callbacks.EMA(decay=0.9, warmup=False)  # the module has the averages at the end
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=2, train_batch_size=8), callbacks=[timms, own])
    trainer.train()
    averaged = timms.ema.module.state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in averaged.items())
    for ours, theirs in zip(module.model.parameters(), timms.ema.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
