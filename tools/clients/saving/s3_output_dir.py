"""A run whose `output_dir` is on S3, resumed on another disk; the server is moto's."""

import os

import s3fs
import torch
from moto.server import ThreadedMotoServer
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


def train(disk, epochs):
    ts.seed_everything(0)
    inputs = torch.randn(32, 3)
    module = ts.SupervisedModule(nn.Linear(3, 1), nn.MSELoss(), "sgd", TensorDataset(inputs, inputs[:, :1]))
    args = ts.TrainerArguments(
        epochs=epochs, train_batch_size=8, output_dir="s3://bucket/line", local_dir=disk, resume="auto", progress="none"
    )
    trainer = ts.Trainer(module, args)
    trainer.train()
    return trainer.global_steps_finished


if __name__ == "__main__":
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    store = s3fs.S3FileSystem()
    store.mkdir("bucket")
    assert train("one", 2) == 8
    assert train("other", 3) == 12
    store.invalidate_cache()
    assert any("checkpoint-000000012" in name for name in store.find("bucket/line"))
    server.stop()
