"""One graph as the full batch, with masks, as in PyTorch Geometric's node classification."""

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import trainstack as ts


class Nodes(ts.ModuleInterface):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(2, 2)
        labels = torch.arange(20) % 2
        edges = torch.stack([torch.arange(20), (torch.arange(20) + 2) % 20])
        mask = torch.arange(20) < 12
        self.graph = Data(x=torch.rand(20, 2) + labels[:, None], edge_index=edges, y=labels, train_mask=mask)

    def get_train_dataloader(self, sampler, batch_size):
        return self.build_dataloader([self.graph], sampler, batch_size, collate_fn=lambda graphs: graphs[0])

    get_val_dataloaders = get_train_dataloader

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adam(self.parameters(), lr=0.1), None

    def batch_weight(self, batch):
        return 1

    def train_step(self, global_step, batch, device):
        scores = self.conv(batch.x, batch.edge_index)
        return cross_entropy(scores[batch.train_mask], batch.y[batch.train_mask])

    def val_step(self, global_step, batch, device):
        scores = self.conv(batch.x, batch.edge_index)[~batch.train_mask]
        return {"right": scores.argmax(1) == batch.y[~batch.train_mask]}

    def on_end_val_epoch(self, global_step, outputs, key="default"):
        self.log("val/accuracy", outputs["right"].float().mean())


if __name__ == "__main__":
    ts.seed_everything(0)
    trainer = ts.Trainer(Nodes(), ts.TrainerArguments(epochs=40, train_batch_size=1, val_batch_size=1))
    trainer.train()
    assert trainer.history.get_latest_metric("val/accuracy") > 0.9
