"""huggingface_hub reads the card of an export with its front matter."""

import torch
from huggingface_hub import ModelCard
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts

if __name__ == "__main__":
    inputs = torch.randn(32, 3)
    module = ts.SupervisedModule(nn.Linear(3, 1), nn.MSELoss(), "sgd", TensorDataset(inputs, inputs[:, :1]))
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=8))
    trainer.train()
    trainer.export("exported")
    card = ModelCard.load("exported/README.md")
    assert card.data.to_dict().get("library_name")
