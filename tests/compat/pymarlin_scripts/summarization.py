"""Summaries: padded sequences, generation in `val_step`, the last batch dropped, validation before training."""

import torch
from encoding import WORDS, sentences, tokenize
from pymarlin.core import module_interface, trainer, trainer_backend
from pymarlin.core.data_interface import DataInterface
from pymarlin.utils.config_parser.custom_arg_parser import CustomArgParser
from pymarlin.utils.distributed import rank_zero_only
from pymarlin.utils.logger import getlogger
from pymarlin.utils.stats import global_stats
from torch import nn
from torch.utils.data import DataLoader, default_collate

logger = getlogger(__file__, "WARNING")

CONFIG = """
trainer:
    max_train_steps_per_epoch: 2
    max_val_steps_per_epoch: 2
    train_batch_size: 2
    val_batch_size: 2
    epochs: 3
    gpu_batch_size_limit: 16
    disable_tqdm: False
    writers: ["aml", "tensorboard"]
    backend: "sp"
module:
    max_length_decoder: 6
wrt:
    tb_log_dir: 'logs'
stat:
    log_steps: 1
chkp:
    checkpoint: False
    delete_existing_checkpoints: True
    save_dir: 'checkpoints'
    load_dir: null
generate:
    max_length: 4
"""


class Articles(DataInterface):
    def __init__(self):
        self.rows = [(text, text.split()[1]) for text in sentences(9)]

    def get_train_dataset(self, *args, **kwargs):
        return self.rows

    def get_val_dataset(self, *args, **kwargs):
        return self.rows


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(len(WORDS), 8), nn.Linear(8, len(WORDS))

    def forward(self, input_ids, attention_mask, labels):
        context = self.embed(input_ids).mean(1, keepdim=True)
        logits = self.out(context.expand(-1, labels.shape[1], -1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def generate(self, input_ids, max_length):
        best = self.out(self.embed(input_ids).mean(1)).argmax(-1)
        return best[:, None].expand(-1, max_length)


class Summaries(module_interface.ModuleInterface):
    def __init__(self, data, max_length_decoder=6, max_lr=1e-2, generate_kwargs={}):  # noqa: B006
        super().__init__()
        self.model, self.data, self.max_lr = Seq2Seq(), data, max_lr
        self.max_length_decoder, self.generate_kwargs = max_length_decoder, generate_kwargs

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int):
        optimizer = torch.optim.Adam(self.model.parameters(), self.max_lr)
        self.schedulers = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.max_lr, steps_per_epoch=estimated_global_steps_per_epoch, epochs=epochs
        )
        return [optimizer], [self.schedulers]

    def get_train_dataloader(self, sampler: torch.utils.data.Sampler, batch_size: int):
        ds = self.data.get_train_dataset()
        return DataLoader(ds, batch_size, collate_fn=self.collate_fun, sampler=sampler(ds), drop_last=True)

    def get_val_dataloaders(self, sampler: torch.utils.data.Sampler, batch_size: int):
        ds = self.data.get_val_dataset()
        return DataLoader(ds, batch_size, collate_fn=self.collate_fun, sampler=sampler(ds), drop_last=True)

    def collate_fun(self, batch):
        source, target = default_collate(batch)
        tokens, labels = tokenize(list(source)), tokenize(list(target), self.max_length_decoder)["input_ids"]
        labels[labels[:, :] == 0] = -100
        tokens["labels"] = labels
        return tokens

    def train_step(self, global_step: int, batch, device):
        batch = batch.to(device)
        global_stats.update("lr", self.schedulers.get_last_lr()[0], frequent=True)
        return self.model.forward(**batch)

    def val_step(self, global_step: int, batch, device):
        batch = batch.to(device)
        found = self.model.generate(batch.input_ids, **self.generate_kwargs)
        labels = batch.labels
        labels[labels[:, :] == -100] = 0
        padded = torch.zeros_like(labels)
        padded[:, : found.shape[-1]] = found
        return padded, labels

    @rank_zero_only
    def on_end_val_epoch(self, global_step, *collated_output, key="default"):
        summaries, labels = collated_output
        assert summaries.shape == labels.shape == (4, 6)
        global_stats.update_multi("metrics/rouge", {"rouge1": float((summaries == labels).float().mean())})


if __name__ == "__main__":
    config = CustomArgParser(yaml_file_arg_key="config_path").parse()
    args = trainer.TrainerArguments(
        **config["trainer"],
        stats_args=trainer.stats.StatInitArguments(**config["stat"]),
        writer_args=trainer.WriterInitArguments(**config["wrt"]),
        checkpointer_args=trainer.DefaultCheckpointerArguments(**config["chkp"]),
    )
    backend = trainer_backend.build_trainer_backend("sp")
    module = Summaries(Articles(), **config["module"], generate_kwargs=config["generate"])
    trainer = trainer.Trainer(module=module, args=args, trainer_backend=backend)
    trainer.validate()
    trainer.train()
    assert trainer.global_steps_finished == 6
