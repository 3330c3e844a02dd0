"""pytorch/examples, mnist: a network with dropout, Adadelta, a rate that decreases each epoch, test accuracy."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.training import loader, train, weights_of
from trainstack import ModuleInterface, SchedulerConfig


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(2304, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def data(count, seed):
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 1, 28, 28, generator=draw), torch.randint(10, (count,), generator=draw))


def plain():
    torch.manual_seed(1)
    model = Net()
    train_loader, test_loader = loader(data(100, 0), batch_size=16), loader(data(40, 1), batch_size=20)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        model.train()
        for images, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), target)
            loss.backward()
            optimizer.step()
        model.eval()
        test_loss = correct = 0
        with torch.no_grad():
            for images, target in test_loader:
                output = model(images)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += output.argmax(1).eq(target).sum().item()
        test_loss /= 40
        scheduler.step()
    return [*weights_of(model), torch.tensor(test_loss, dtype=torch.float32), torch.tensor(correct / 40)]


class Mnist(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model = Net()

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(data(100, 0), batch_size=batch_size)

    def get_val_dataloaders(self, sampler, batch_size):
        return DataLoader(data(40, 1), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        optimizer = torch.optim.Adadelta(self.parameters(), lr=1.0)
        return optimizer, SchedulerConfig(StepLR(optimizer, step_size=1, gamma=0.7), interval="epoch")

    def train_step(self, global_step, batch, device):
        images, target = batch
        return F.nll_loss(self.model(images), target)

    def val_step(self, global_step, batch, device):
        images, target = batch
        output = self.model(images)
        return {"loss": F.nll_loss(output, target), "correct": output.argmax(1).eq(target)}

    def on_end_val_epoch(self, global_step, results, key="default"):
        self.log("val/accuracy", results["correct"].float().mean())


def port():
    torch.manual_seed(1)
    module = Mnist()
    history = train(module, epochs=2, train_batch_size=16, val_batch_size=20).history
    metrics = [history.get_latest_metric(name) for name in ("val/loss", "val/accuracy")]
    return [*weights_of(module.model), *(torch.tensor(value, dtype=torch.float32) for value in metrics)]
