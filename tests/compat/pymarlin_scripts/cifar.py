"""Image classification: a convolutional net, one optimizer, no scheduler, configuration by YAML."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from pymarlin import ModuleInterface
from pymarlin.core import data_interface, trainer, trainer_backend
from pymarlin.utils.checkpointer.checkpoint_utils import DefaultCheckpointerArguments
from pymarlin.utils.config_parser.custom_arg_parser import CustomArgParser
from torch.utils.data import DataLoader, TensorDataset

CONFIG = """
tr:
  epochs: 2
  train_batch_size: 8
  val_batch_size: 16
  writers: ['tensorboard']
  clip_grads: False
  log_level: 'INFO'
  backend: sp
  max_train_steps_per_epoch: null
"""


class Images(data_interface.DataProcessor):
    def process(self):
        generator = torch.Generator().manual_seed(0)
        pictures, classes = torch.rand(48, 3, 8, 8, generator=generator), torch.arange(48) % 4
        self.parts = {"train": TensorDataset(pictures[:32], classes[:32]), "test": TensorDataset(pictures, classes)}
        return self.parts

    def analyze(self):
        print({name: len(part) for name, part in self.parts.items()})


class ImageData(data_interface.DataInterface):
    def __init__(self, processor: Images):
        self.parts = processor.process_data()

    def get_train_dataset(self):
        return self.parts["train"]

    def get_val_dataset(self):
        return self.parts["test"]


class Recipe(ModuleInterface):
    def __init__(self, data):
        super().__init__()
        self.data_interface = data
        self.conv, self.out = nn.Conv2d(3, 4, 3), nn.Linear(4 * 9, 4)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int):
        return [self.optimizer], []

    def get_train_dataloader(self, sampler: type, batch_size: int):
        ds = self.data_interface.get_train_dataset()
        return DataLoader(ds, batch_size=batch_size, sampler=sampler(ds))

    def get_val_dataloaders(self, sampler: torch.utils.data.Sampler, batch_size: int):
        ds = self.data_interface.get_val_dataset()
        return DataLoader(ds, batch_size=batch_size, sampler=sampler(ds))

    def net(self, pictures):
        return self.out(F.max_pool2d(F.relu(self.conv(pictures)), 2).flatten(1))

    def train_step(self, global_step: int, batch, device):
        pictures, classes = batch
        return self.criterion(self.net(pictures.to(device)), classes.to(device))

    def val_step(self, global_step: int, batch, device):
        pictures, classes = batch
        return self.net(pictures.to(device)).argmax(1), classes.to(device)

    def on_end_val_epoch(self, global_step: int, *val_step_collated_outputs, key="default"):
        predicted, classes = val_step_collated_outputs
        print(f"accuracy at step {global_step} = {(predicted == classes).float().mean()}")


if __name__ == "__main__":
    config = CustomArgParser().parse()
    args = trainer.TrainerArguments(**config["tr"], checkpointer_args=DefaultCheckpointerArguments(checkpoint=False))
    tr = trainer.Trainer(module=Recipe(ImageData(Images())), args=args, trainer_backend=trainer_backend.SingleProcess())
    tr.train()
    assert tr.global_steps_finished == 8
