"""Sentence pairs: one-cycle schedule, statistics from the steps, two validation sets, checkpoints."""

import torch
import torch.nn as nn
import torch.optim as optim
from encoding import WORDS, sentences, tokenize
from pymarlin.core.data_interface import DataInterface
from pymarlin.core.module_interface import ModuleInterface
from pymarlin.core.trainer import (
    DefaultCheckpointerArguments,
    DistributedTrainingArguments,
    Trainer,
    TrainerArguments,
    WriterInitArguments,
)
from pymarlin.core.trainer_backend import DDPTrainerBackend, SingleProcess, SingleProcessAmp, SingleProcessApexAmp
from pymarlin.utils.config_parser.custom_arg_parser import CustomArgParser
from pymarlin.utils.stats import global_stats
from pymarlin.utils.stats.basic_stats import StatInitArguments
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, default_collate

CONFIG = """
glue_task: 'mnli'
mi:
    num_labels: 2
    max_lr: 0.01
    warmup: 0.06
tr:
    max_train_steps_per_epoch: null
    train_batch_size: 8
    val_batch_size: 16
    epochs: 2
    gpu_batch_size_limit: 4
    disable_tqdm: False
    writers: ['stdout', 'aml', 'tensorboard']
    backend: 'sp'
wrt:
    tb_log_dir: 'logs/mnli'
stat:
    log_steps: 20
dist:
    local_rank: 0
ckp:
    checkpoint: True
    period: 5
"""


class PairData(DataInterface):
    def setup_datasets(self, glue_task="cola"):
        self.glue_task = glue_task
        rows = [{"s1": s, "s2": s, "label": i % 2} for i, s in enumerate(sentences(24))]
        self.train_ds, self.val_ds = rows, {"matched": rows[:9], "mismatched": rows[9:]}

    def get_train_dataset(self):
        return self.train_ds

    def get_val_dataset(self):
        return self.val_ds


class PairClassifier(ModuleInterface):
    def __init__(self, data_interface, max_lr=2e-5, num_labels=2, warmup=0.1, encoder: nn.Module | None = None):
        super().__init__()
        self.data_interface, self.max_lr, self.warmup = data_interface, max_lr, warmup
        self.glue_task = data_interface.glue_task
        self.encoder = encoder or nn.EmbeddingBag(len(WORDS), 8)
        self.net = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, num_labels))
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = optim.Adam(self.parameters(), lr=max_lr)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int):
        self.scheduler = OneCycleLR(
            self.optimizer,
            max_lr=self.max_lr,
            steps_per_epoch=estimated_global_steps_per_epoch,
            epochs=epochs,
            anneal_strategy="linear",
            pct_start=self.warmup,
        )
        return [self.optimizer], [self.scheduler]

    def collate_fun(self, batch):
        batch = default_collate(batch)
        return tokenize(batch["s1"]), batch["label"]

    def get_train_dataloader(self, sampler: type, batch_size: int):
        ds = self.data_interface.get_train_dataset()
        return DataLoader(ds, sampler=sampler(ds), batch_size=batch_size, collate_fn=self.collate_fun)

    def get_val_dataloaders(self, sampler: torch.utils.data.Sampler, batch_size: int):
        return {
            key: DataLoader(ds, sampler=sampler(ds), batch_size=batch_size, collate_fn=self.collate_fun)
            for key, ds in self.data_interface.get_val_dataset().items()
        }

    def train_step(self, global_step: int, batch, device="cpu", encoder=None):
        global_stats.update(f"lr/{self.glue_task}", self.scheduler.get_last_lr()[0], frequent=True)
        inputs, labels = batch
        inputs, labels = inputs.to(device), labels.to(device)
        loss = self.criterion(self.net(self.encoder(inputs.input_ids)), labels)
        global_stats.update(f"loss/{self.glue_task}", loss.item(), frequent=True)
        return loss

    def val_step(self, global_step: int, batch, device="cpu", encoder=None):
        inputs, labels = batch
        inputs, labels = inputs.to(device), labels.to(device)
        logits = self.net(self.encoder(inputs.input_ids))
        return self.criterion(logits, labels), logits.data.argmax(1), labels

    def on_end_val_epoch(self, global_step: int, *val_step_collated_outputs, key="default"):
        loss, predicted, labels = val_step_collated_outputs
        global_stats.update(f"{self.glue_task}/val_{key}/loss", loss.mean().item())
        global_stats.update(f"{self.glue_task}/val_{key}/acc", (predicted == labels).numpy().mean())


def run(config):
    data = PairData()
    data.setup_datasets(config["glue_task"])
    trainer = Trainer(
        PairClassifier(data, **config["mi"]),
        TrainerArguments(
            **config["tr"],
            writer_args=WriterInitArguments(**config["wrt"]),
            stats_args=StatInitArguments(**config["stat"]),
            checkpointer_args=DefaultCheckpointerArguments(**config["ckp"]),
            distributed_training_args=DistributedTrainingArguments(**config["dist"]),
        ),
    )
    trainer.train()
    trainer.validate()
    return trainer


if __name__ == "__main__":
    trainer = run(CustomArgParser().parse())
    assert trainer.history.get_latest_metric("mnli/val_mismatched/acc") >= 0
    assert {DDPTrainerBackend, SingleProcess, SingleProcessAmp, SingleProcessApexAmp}
