"""Tweets: the package under another name, hooks with named outputs, preparation in several processes."""

from dataclasses import dataclass

import pymarlin as ml
import torch
from encoding import WORDS, sentences, tokenize
from pymarlin.core.data_interface import DataInterface, DataProcessor
from pymarlin.utils.checkpointer.checkpoint_utils import DefaultCheckpointerArguments
from pymarlin.utils.logger.logging_utils import getlogger
from pymarlin.utils.stats.basic_stats import StatInitArguments
from pymarlin.utils.writer.base import WriterInitArguments
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, default_collate, random_split

CONFIG = """
trainer:
    max_train_steps_per_epoch: 20
    max_val_steps_per_epoch: 5
    train_batch_size: 8
    val_batch_size: 4
    epochs: 1
    gpu_batch_size_limit: 8
    clip_grads: False
    use_gpu: True
    max_grad_norm: 1.0
    writers: ['stdout', 'aml', 'tensorboard']
    reset_optimizers_schedulers: True
    backend: sp
chkp:
    checkpoint: True
    delete_existing_checkpoints: False
    period: 1
    save_dir: 'checkpoints'
    file_prefix: 'tweets'
    file_ext: 'pt'
    log_level: 'DEBUG'
stat:
    log_steps: 50
    update_system_stats: False
    log_model_steps: 1000
wrts:
    model_log_level: 'INFO'
    tb_log_dir: 'logs'
module:
    max_lr: 0.004
    log_level: 'WARNING'
data:
    splitpct: 20
"""


@dataclass
class DataArguments:
    splitpct: int = 10


class Prepare(DataProcessor):
    def __init__(self, args):
        self.args = args

    def process(self):
        rows = [(text, i % 2) for i, text in enumerate(sentences(40))]
        held_out = len(rows) * self.args.splitpct // 100
        return random_split(rows, [len(rows) - held_out, held_out])


class Tweets(DataInterface):
    def setup_datasets(self, train_ds, val_ds):
        self.train_ds, self.val_ds = train_ds, val_ds

    def get_train_dataset(self):
        return self.train_ds

    def get_val_dataset(self):
        return self.val_ds


@dataclass
class ModuleArguments:
    max_lr: float = 0.00004
    log_level: str = "INFO"


class TweetModule(ml.ModuleInterface):
    def __init__(self, data: Tweets, args: ModuleArguments):
        super().__init__()
        self.args, self.data = args, data
        self.logger = getlogger(__name__, self.args.log_level)
        self.lrs, self.train_losses, self.val_losses, self.val_accs = [], [], [], []
        self.model = nn.Sequential(nn.EmbeddingBag(len(WORDS), 8), nn.Linear(8, 2))

    def train_step(self, global_step: int, batch, device):
        batch = batch.to(device)
        return nn.functional.cross_entropy(self.model(batch.input_ids), batch.labels)

    def val_step(self, global_step: int, batch, device):
        batch = batch.to(device)
        logits = self.model(batch.input_ids)
        return nn.functional.cross_entropy(logits, batch.labels), logits, batch.labels

    def get_train_dataloader(self, sampler, batch_size):
        ds = self.data.get_train_dataset()
        return DataLoader(ds, collate_fn=self.collate_fn, batch_size=batch_size, sampler=sampler(ds))

    def get_val_dataloaders(self, sampler, batch_size):
        ds = self.data.get_val_dataset()
        return DataLoader(ds, collate_fn=self.collate_fn, batch_size=batch_size, sampler=sampler(ds))

    def collate_fn(self, batch):
        texts, labels = default_collate(batch)
        tokens = tokenize(list(texts))
        tokens["labels"] = labels
        return tokens

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.args.max_lr)
        self.schedulers = OneCycleLR(
            optimizer, max_lr=self.args.max_lr, steps_per_epoch=estimated_global_steps_per_epoch, epochs=epochs
        )
        return [optimizer], [self.schedulers]

    def on_end_train_step(self, global_step, train_loss):
        self.lrs.append(self.schedulers.get_last_lr()[0])

    def on_end_train_epoch(self, global_step, train_losses):
        self.train_losses.extend(train_losses)
        assert self.val_accs, "the validation of the epoch comes first"

    def on_end_val_epoch(self, global_step, losses, logits, labels, key="default"):
        self.val_losses.append(losses.mean())
        self.val_accs.append((logits.argmax(-1) == labels).sum() / labels.shape[0])

    def on_end_train(self, global_step):
        assert len(self.lrs) == len(self.train_losses) == global_step


if __name__ == "__main__":
    config = ml.CustomArgParser(log_level="WARNING").parse()
    data = Tweets()
    data.setup_datasets(*Prepare(DataArguments(**config["data"])).process_data())
    trainer_args = config["trainer"]
    trainer_args["stats_args"] = StatInitArguments(**config["stat"])
    trainer_args["writer_args"] = WriterInitArguments(**config["wrts"])
    trainer_args["checkpointer_args"] = DefaultCheckpointerArguments(**config["chkp"])
    module = TweetModule(data=data, args=ModuleArguments(**config["module"]))
    trainer = ml.Trainer(module=module, args=ml.TrainerArguments(**trainer_args))
    trainer.train()
    loss, logits, labels = trainer.validate()
    if trainer.args.distributed_training_args.local_rank == 0:
        assert logits.shape == (8, 2)
