"""pytorch/examples, word_language_model: a state from batch to batch, clipping, a rate that decreases on a plateau."""

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from tools.field_scripts.training import train, weights_of
from trainstack import ModuleInterface, SchedulerConfig

WORDS, COLUMNS, BPTT, EPOCHS = 40, 5, 7, 3


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(WORDS, 16)
        self.rnn, self.decoder = nn.LSTM(16, 16, 2, dropout=0.2), nn.Linear(16, WORDS)

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        return self.decoder(self.drop(output)).view(-1, WORDS), hidden

    def init_hidden(self):
        weight = next(self.parameters())
        return weight.new_zeros(2, COLUMNS, 16), weight.new_zeros(2, COLUMNS, 16)


class Segments(Dataset):
    """The parts of a text in columns: words (BPTT, COLUMNS) and the next words. The last part is shorter."""

    def __init__(self, length, seed):
        self.source = torch.randint(WORDS, (length, COLUMNS), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return -(-(len(self.source) - 1) // BPTT)

    def __getitem__(self, index):
        start = index * BPTT
        length = min(BPTT, len(self.source) - 1 - start)
        return self.source[start : start + length], self.source[start + 1 : start + 1 + length].view(-1)


def plain():
    torch.manual_seed(1)
    model, criterion = RNNModel(), nn.CrossEntropyLoss()
    train_data, val_data = Segments(40, 0), Segments(31, 1)
    lr, best = 5.0, None
    for _ in range(EPOCHS):
        model.train()
        hidden = model.init_hidden()
        for number in range(len(train_data)):
            words, targets = train_data[number]
            model.zero_grad()
            hidden = tuple(part.detach() for part in hidden)
            output, hidden = model(words, hidden)
            criterion(output, targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-lr)
        model.eval()
        hidden, total = model.init_hidden(), 0.0
        with torch.no_grad():
            for number in range(len(val_data)):
                words, targets = val_data[number]
                output, hidden = model(words, hidden)
                total += len(words) * criterion(output, targets).item()
        val_loss = total / 30
        if best is None or val_loss < best:
            best = val_loss
        else:
            lr /= 4.0
    return [*weights_of(model), torch.tensor(lr), torch.tensor(val_loss, dtype=torch.float32)]


class LanguageModel(ModuleInterface):
    splits_batches = False
    evaluate_on_main = True

    def __init__(self):
        super().__init__()
        self.model, self.criterion = RNNModel(), nn.CrossEntropyLoss()
        self.hidden = self.val_hidden = None

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(Segments(40, 0), batch_size=None)

    def get_val_dataloaders(self, sampler, batch_size):
        return DataLoader(Segments(31, 1), batch_size=None)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        optimizer = torch.optim.SGD(self.parameters(), lr=5.0)
        plateau = ReduceLROnPlateau(optimizer, factor=0.25, patience=0, threshold=0)
        return optimizer, SchedulerConfig(plateau, monitor="val/loss")

    def on_begin_train_epoch(self, global_step, epoch):
        self.hidden = self.model.init_hidden()

    def train_step(self, global_step, batch, device):
        words, targets = batch
        output, hidden = self.model(words, self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return self.criterion(output, targets)

    def val_step(self, global_step, batch, device):
        words, targets = batch
        output, self.val_hidden = self.model(words, self.val_hidden or self.model.init_hidden())
        return self.criterion(output, targets)

    def on_end_val_epoch(self, global_step, losses, key="default"):
        self.val_hidden = None

    def get_state(self):
        return {"weights": super().get_state(), "hidden": self.hidden}

    def update_state(self, state):
        if state:
            super().update_state(state["weights"])
            self.hidden = state["hidden"]


def port():
    torch.manual_seed(1)
    module = LanguageModel()
    trainer = train(module, epochs=EPOCHS, train_batch_size=BPTT, clip_grads=True, max_grad_norm=0.25)
    rate = torch.tensor(trainer.optimizers[0].param_groups[0]["lr"])
    loss = torch.tensor(trainer.history.get_latest_metric("val/loss"), dtype=torch.float32)
    return [*weights_of(module.model), rate, loss]
