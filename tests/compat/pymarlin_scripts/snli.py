"""Private training: frozen layers, a constant schedule, sample rate and delta from the data, the accountant."""

import torch
import torch.nn as nn
import torch.optim as optim
from encoding import WORDS, sentences, tokenize
from pymarlin.core.data_interface import DataInterface
from pymarlin.core.module_interface import ModuleInterface
from pymarlin.core.trainer import (
    DefaultCheckpointerArguments,
    DifferentialPrivacyArguments,
    Trainer,
    TrainerArguments,
    WriterInitArguments,
)
from pymarlin.utils.config_parser.custom_arg_parser import CustomArgParser
from pymarlin.utils.stats import global_stats
from pymarlin.utils.stats.basic_stats import StatInitArguments
from torch.optim.lr_scheduler import MultiplicativeLR
from torch.utils.data import DataLoader, default_collate

CONFIG = """
mi:
    num_labels: 3
    lr: 0.005
tr:
    clip_grads: False
    max_train_steps_per_epoch: null
    train_batch_size: 8
    val_batch_size: 16
    epochs: 1
    gpu_batch_size_limit: 4
    disable_tqdm: True
    writers: ['stdout', 'aml', 'tensorboard']
    backend: 'sp-dp'
dp:
    per_sample_max_grad_norm: 1.0
    noise_multiplier: 0.8
wrt:
    tb_log_dir: 'logs/snli'
stat:
    log_steps: 20
ckp:
    checkpoint: False
    period: 5
"""


class Pairs(DataInterface):
    def setup_datasets(self):
        rows = [{"premise": s, "label": i % 3} for i, s in enumerate(sentences(32))]
        self.train_ds, self.val_ds = rows, rows[:9]

    def get_train_dataset(self):
        return self.train_ds

    def get_val_dataset(self):
        return self.val_ds


class Classifier(ModuleInterface):
    def __init__(self, data_interface, lr=2e-5, num_labels=3):
        super().__init__()
        self.data_interface = data_interface
        self.criterion = nn.CrossEntropyLoss()
        self.encoder = nn.Embedding(len(WORDS), 8)
        self.net = nn.Linear(8, num_labels)
        for parameter in self.encoder.parameters():
            parameter.requires_grad = False
        self.optimizer = optim.AdamW(self.parameters(), lr=lr)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int):
        self.scheduler = MultiplicativeLR(self.optimizer, [lambda step: 1])
        return [self.optimizer], [self.scheduler]

    def collate_fun(self, batch):
        batch = default_collate(batch)
        return tokenize(batch["premise"]), batch["label"]

    def get_train_dataloader(self, sampler: type, batch_size: int):
        ds = self.data_interface.get_train_dataset()
        return DataLoader(ds, sampler=sampler(ds), batch_size=batch_size, collate_fn=self.collate_fun)

    def get_val_dataloaders(self, sampler: torch.utils.data.Sampler, batch_size: int):
        ds = self.data_interface.get_val_dataset()
        return DataLoader(ds, batch_size=batch_size, collate_fn=self.collate_fun, sampler=sampler(ds))

    def train_step(self, global_step: int, batch, device="cpu", encoder=None):
        global_stats.update("lr/snli", self.scheduler.get_last_lr()[0], frequent=True)
        inputs, labels = batch
        loss = self.criterion(self.net(self.encoder(inputs["input_ids"].to(device)).mean(1)), labels.to(device))
        global_stats.update("loss/snli", loss.item(), frequent=True)
        return loss

    def val_step(self, global_step: int, batch, device="cpu", encoder=None):
        inputs, labels = batch
        logits = self.net(self.encoder(inputs["input_ids"].to(device)).mean(1))
        return self.criterion(logits, labels.to(device)), logits.data.argmax(1), labels

    def on_end_val_epoch(self, global_step: int, *val_step_collated_outputs, key="default"):
        _, predicted, labels = val_step_collated_outputs
        global_stats.update("snli/val/acc", (predicted == labels).numpy().mean())


if __name__ == "__main__":
    config = CustomArgParser().parse()
    data = Pairs()
    data.setup_datasets()
    sample_rate = config["tr"]["train_batch_size"] / len(data.get_train_dataset())
    delta = 1.0 / len(data.get_train_dataset())
    privacy = DifferentialPrivacyArguments(
        noise_multiplier=config["dp"]["noise_multiplier"],
        per_sample_max_grad_norm=config["dp"]["per_sample_max_grad_norm"],
        sample_rate=sample_rate,
        delta=delta,
    )
    trainer = Trainer(
        Classifier(data_interface=data, **config["mi"]),
        TrainerArguments(
            **config["tr"],
            writer_args=WriterInitArguments(**config["wrt"]),
            stats_args=StatInitArguments(**config["stat"]),
            checkpointer_args=DefaultCheckpointerArguments(**config["ckp"]),
            differential_privacy_args=privacy,
        ),
    )
    trainer.train()
    trainer.validate()
    print(f"epsilon: {trainer.trainer_backend.accountant.get_epsilon(delta=1.0 / len(data.train_ds))}")
