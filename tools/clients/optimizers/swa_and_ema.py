"""torch.optim.swa_utils and `callbacks.EMA`: the averages have equal bits."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset
from torch_ema import ExponentialMovingAverage

import trainstack as ts


class Theirs(ts.Callback):
    def on_train_begin(self, trainer):
        parameters = trainer.module.model.parameters()
        self.swa = AveragedModel(trainer.module.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.swa.update_parameters(trainer.module.model)  # the first call copies
        self.ema = ExponentialMovingAverage(parameters, decay=0.9, use_num_updates=False)

    def on_train_step_end(self, trainer, step):
        self.swa.update_parameters(trainer.module.model)
        self.ema.update()


if __name__ == "__main__":
    ts.seed_everything(0)
    inputs = torch.randn(64, 3)
    module = ts.SupervisedModule(
        nn.Linear(3, 1), nn.MSELoss(), "sgd", TensorDataset(inputs, inputs.sum(1, keepdim=True))
    )
    theirs, own = Theirs(), ts.callbacks.EMA(0.9, warmup=False)
    ts.Trainer(module, ts.TrainerArguments(epochs=2, train_batch_size=8), callbacks=[theirs, own]).train()
    assert torch.equal(module.model.weight, theirs.swa.module.weight)
    torch.testing.assert_close(module.model.weight.detach(), theirs.ema.shadow_params[0])
