"""torchdata's StatefulDataLoader with workers: a resume within an epoch continues at the batch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import trainstack as ts


class Line(ts.SupervisedModule):
    stop_after = None

    def get_train_dataloader(self, sampler, batch_size):
        return StatefulDataLoader(self.train_dataset, batch_size=batch_size, num_workers=2, shuffle=True)

    def on_end_train_step(self, global_step):
        if global_step == self.stop_after:
            raise ts.StopTraining("enough")


def train(folder, stop_after=None):
    ts.seed_everything(0)
    x = torch.arange(32.0)[:, None] / 32
    module = Line(nn.Linear(1, 1), nn.MSELoss(), "sgd", TensorDataset(x, 2 * x))
    module.stop_after = stop_after
    args = ts.TrainerArguments(epochs=2, train_batch_size=4, output_dir=folder, resume="auto")
    ts.Trainer(module, args).train()
    return module.model.weight.item()


if __name__ == "__main__":
    whole = train("whole")
    assert train("parts", stop_after=5) != whole
    assert train("parts") == whole
