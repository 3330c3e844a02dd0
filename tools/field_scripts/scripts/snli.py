"""pytorch/examples, snli: a validation after each few steps, and the best weights."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.training import loader, train, weights_of
from trainstack import DefaultCheckpointerArguments, ModuleInterface, read_checkpoint

EVERY = 5  # steps


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(50, 12), nn.LSTM(12, 10, bidirectional=True, batch_first=True)
        self.out = nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, premise, hypothesis):
        ends = [self.encoder(self.embed(text))[1][0].transpose(0, 1).flatten(1) for text in (premise, hypothesis)]
        return self.out(torch.cat(ends, 1))


def data(count, seed):
    draw = torch.Generator().manual_seed(seed)
    texts = [torch.randint(50, (count, 8), generator=draw) for _ in range(2)]
    return TensorDataset(*texts, torch.randint(3, (count,), generator=draw))


def plain():
    torch.manual_seed(1)
    model, criterion = Classifier(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    iterations, best_accuracy, best = 0, -1.0, []
    for _ in range(3):
        for premise, hypothesis, label in loader(data(60, 0), batch_size=8):
            model.train()
            optimizer.zero_grad()
            iterations += 1
            loss = criterion(model(premise, hypothesis), label)
            loss.backward()
            optimizer.step()
            if iterations % EVERY == 0:
                model.eval()
                correct = 0
                with torch.no_grad():
                    for premise, hypothesis, label in loader(data(30, 1), batch_size=10):
                        correct += (model(premise, hypothesis).argmax(1) == label).sum().item()
                if correct / 30 > best_accuracy:
                    best_accuracy, best = correct / 30, weights_of(model)
    return [*weights_of(model), *best, torch.tensor(best_accuracy)]


class Snli(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model, self.criterion = Classifier(), nn.CrossEntropyLoss()

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(data(60, 0), batch_size=batch_size)

    def get_val_dataloaders(self, sampler, batch_size):
        return DataLoader(data(30, 1), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adam(self.parameters(), lr=1e-2), None

    def train_step(self, global_step, batch, device):
        premise, hypothesis, label = batch
        return self.criterion(self.model(premise, hypothesis), label)

    def val_step(self, global_step, batch, device):
        premise, hypothesis, label = batch
        output = self.model(premise, hypothesis)
        return {"loss": self.criterion(output, label), "correct": output.argmax(1) == label}

    def on_end_val_epoch(self, global_step, results, key="default"):
        self.log("val/accuracy", results["correct"].float().mean())


def port():
    torch.manual_seed(1)
    module = Snli()
    with tempfile.TemporaryDirectory() as folder:
        keep = DefaultCheckpointerArguments(monitor="val/accuracy", keep_best=1, keep_last=1)
        trainer = train(
            module,
            epochs=3,
            train_batch_size=8,
            val_batch_size=10,
            validate_every=EVERY,
            checkpointer_args=keep,
            output_dir=folder,
        )
        found = trainer.checkpointer.best()
        best = read_checkpoint(Path(folder) / "checkpoints" / found.name).module_interface_state
    accuracy = torch.tensor(found.metrics["val/accuracy"])
    return [*weights_of(module.model), *(best[f"model.{name}"] for name in module.model.state_dict()), accuracy]
