"""A plugin: base class, module with properties, rank-zero hooks, setup in parts."""

import dataclasses
from abc import abstractmethod

import torch
from encoding import WORDS, sentences, tokenize
from pymarlin.core import data_interface, module_interface
from pymarlin.core import trainer as trn
from pymarlin.utils.config_parser.custom_arg_parser import CustomArgParser
from pymarlin.utils.distributed import rank_zero_only
from pymarlin.utils.logger.logging_utils import getlogger
from pymarlin.utils.stats import global_stats
from torch import nn
from torch.utils.data import DataLoader, default_collate

logger = getlogger(__name__, "WARNING")

CONFIG = """
data:
    labels_list: ['Negative', 'Neutral', 'Positive']
module:
    max_lr: 0.01
    has_labels: True
trainer:
    backend: "sp"
    train_batch_size: 8
    val_batch_size: 16
    epochs: 2
    gpu_batch_size_limit: 8
    clip_grads: True
    use_gpu: True
    max_grad_norm: 1.0
    disable_tqdm: True
    log_level: "INFO"
ckpt:
    checkpoint: True
    delete_existing_checkpoints: False
    period: 1
    save_dir: 'marlin_states'
    model_state_save_dir: 'model_ckpts'
    file_prefix: 'marlin'
    file_ext: 'bin'
stats:
    log_steps: 5
    update_system_stats: True
    log_model_steps: 1000
    exclude_list: 'bias|LayerNorm'
wrts:
    model_log_level: 'INFO'
    tb_log_dir: 'logs'
    tb_logpath_parent_env: null
    tb_log_multi: False
    tb_log_hist_steps: 20000
"""


class Plugin:
    def __init__(self, config=None):
        config = config or CustomArgParser(log_level="WARNING").parse()
        self.trainer_args = trn.TrainerArguments(
            **config["trainer"],
            stats_args=trn.stats.StatInitArguments(**config["stats"]),
            writer_args=trn.WriterInitArguments(**config["wrts"]),
            checkpointer_args=trn.DefaultCheckpointerArguments(**config["ckpt"]),
        )
        self.data_args = DataArguments(**config["data"])
        self.module_args = ModuleArguments(**config["module"])

    @property
    def trainer(self):
        return self._trainer

    @trainer.setter
    def trainer(self, made: trn.Trainer):
        assert isinstance(made, trn.Trainer)
        self._trainer = made

    @abstractmethod
    def setup(self):
        """Make data, module and trainer."""


@dataclasses.dataclass
class DataArguments:
    labels_list: list = None


@dataclasses.dataclass
class ModuleArguments:
    max_lr: float = 0.00004
    has_labels: bool = True


class Texts(data_interface.DataInterface):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.rows = [(text, i % len(args.labels_list)) for i, text in enumerate(sentences(24))]

    def get_train_dataset(self):
        return self.rows

    def get_val_dataset(self):
        return self.rows[:10]

    def get_labels(self):
        return self.args.labels_list


class TextModule(module_interface.ModuleInterface):
    def __init__(self, args, data):
        super().__init__()
        self.args, self.data = args, data
        self.model = nn.Sequential(nn.EmbeddingBag(len(WORDS), 8), nn.Linear(8, len(data.get_labels())))

    @property
    def data(self):
        return self._data

    @data.setter
    def data(self, given):
        assert isinstance(given, data_interface.DataInterface)
        self._data = given

    @property
    def model(self):
        return self._model

    @model.setter
    def model(self, given):
        self._model = given

    def get_train_dataloader(self, sampler: torch.utils.data.Sampler, batch_size: int):
        ds = self.data.get_train_dataset()
        return DataLoader(ds, batch_size=batch_size, collate_fn=self.collate_fun, sampler=sampler(ds))

    def get_val_dataloaders(self, sampler: torch.utils.data.Sampler, batch_size: int):
        ds = self.data.get_val_dataset()
        return DataLoader(ds, batch_size=batch_size, collate_fn=self.collate_fun, sampler=sampler(ds))

    def collate_fun(self, batch):
        texts, labels = default_collate(batch)
        tokens = tokenize(list(texts))
        tokens["labels"] = labels
        return tokens

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int):
        self.optimizer = torch.optim.Adam(self.model.parameters(), self.args.max_lr)
        steps = estimated_global_steps_per_epoch * epochs
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, self.args.max_lr, total_steps=steps)
        return [self.optimizer], [self.scheduler]

    def train_step(self, global_step, batch, device):
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        return nn.functional.cross_entropy(self.model(inputs["input_ids"]), inputs["labels"])

    def val_step(self, global_step, batch, device):
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        logits = self.model(inputs["input_ids"])
        return nn.functional.cross_entropy(logits, inputs["labels"]), logits, inputs["labels"]

    def on_end_train_step(self, global_step, train_loss):
        global_stats.update("lr", self.optimizer.param_groups[0]["lr"], frequent=True)

    def on_end_train(self, global_step):
        logger.info("finished")

    @rank_zero_only
    def on_end_val_epoch(self, global_step, *values, key="default"):
        losses, logits, labels = values
        assert len(logits) == len(labels) == 10
        global_stats.update(key + "/val_loss", losses.mean().item(), frequent=False)
        global_stats.update_multi(key, {"acc": float((logits.argmax(-1) == labels).float().mean())})


class TextPlugin(Plugin):
    def setup(self):
        module = TextModule(self.module_args, Texts(self.data_args))
        self.trainer = trn.Trainer(args=self.trainer_args, module=module)


if __name__ == "__main__":
    plugin = TextPlugin()
    plugin.setup()
    plugin.trainer.train()
    plugin.trainer.validate()
    assert {"stats/lr", "default/acc", "default/val_loss"} <= plugin.trainer.history.get_metric_names()
