"""`push_to_hub` writes one commit with weights and a card; the server is replaced by a function."""

from pathlib import Path

import huggingface_hub
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts

uploaded = {}


def create_repo(self, repo_id, **options):
    return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")


def upload_folder(self, *, repo_id, folder_path, **options):
    uploaded[repo_id] = {file.name: file.read_bytes() for file in Path(folder_path).iterdir()}
    return huggingface_hub.CommitInfo(
        commit_url=f"https://huggingface.co/{repo_id}/commit/1", commit_message="m", commit_description="", oid="1"
    )


if __name__ == "__main__":
    huggingface_hub.HfApi.create_repo = create_repo
    huggingface_hub.HfApi.upload_folder = upload_folder
    inputs = torch.randn(32, 3)
    module = ts.SupervisedModule(nn.Linear(3, 1), nn.MSELoss(), "sgd", TensorDataset(inputs, inputs[:, :1]))
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=8))
    trainer.train()
    trainer.push_to_hub("me/line")
    names = set(uploaded["me/line"])
    assert "README.md" in names
    assert any(name.endswith(".safetensors") for name in names)
