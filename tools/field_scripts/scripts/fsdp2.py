"""pytorch/examples, distributed/FSDP2: a transformer whose layers are sharded over two processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.training import train, weights_of
from trainstack import ModuleInterface, launch

PROCESSES, BATCH, STEPS = 2, 8, 6


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def transformer():
    torch.manual_seed(0)
    return Transformer()


def data():
    return torch.randint(30, (BATCH * STEPS, 6), generator=torch.Generator().manual_seed(0))


def plain_process():
    dist.init_process_group("gloo")
    model = transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for tokens in data().split(BATCH):
        loss = model(tokens.chunk(PROCESSES)[dist.get_rank()]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = weights_of(model)
    dist.destroy_process_group()
    return weights


def plain():
    return launch(plain_process, nproc=PROCESSES)[0]


class Fsdp2(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model = transformer()

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(TensorDataset(data()), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adam(self.parameters(), lr=1e-2), None

    def train_step(self, global_step, batch, device):
        return self.model(batch[0]).sum()


def port_process():
    module = Fsdp2()
    trainer = train(module, backend="fsdp", epochs=1, train_batch_size=BATCH)
    weights = weights_of(module.model)
    trainer.close()
    return weights


def port():
    return launch(port_process, nproc=PROCESSES)[0]
