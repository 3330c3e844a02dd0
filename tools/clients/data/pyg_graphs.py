"""Graph classification with PyTorch Geometric: batches of graphs, metrics by `metric_inputs`."""

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, global_mean_pool
from torchmetrics.classification import MulticlassAccuracy

import trainstack as ts


class Graphs(ts.ModuleInterface):
    def __init__(self):
        super().__init__()
        self.conv, self.head = GCNConv(3, 8), torch.nn.Linear(8, 2)
        self.metrics = {"accuracy": MulticlassAccuracy(2, average="micro")}
        ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        self.data = [Data(x=torch.rand(4, 3) + i % 2, edge_index=ring, y=torch.tensor([i % 2])) for i in range(20)]

    def get_train_dataloader(self, sampler, batch_size):
        return self.build_dataloader(self.data, sampler, batch_size, collate_fn=Batch.from_data_list)

    get_val_dataloaders = get_train_dataloader

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adam(self.parameters(), lr=0.05), None

    def batch_weight(self, batch):
        return batch.num_graphs

    def scores(self, batch):
        return self.head(global_mean_pool(self.conv(batch.x, batch.edge_index).relu(), batch.batch))

    def train_step(self, global_step, batch, device):
        return cross_entropy(self.scores(batch), batch.y)

    def val_step(self, global_step, batch, device):
        scores = self.scores(batch)
        return {"loss": cross_entropy(scores, batch.y), "preds": scores, "target": batch.y}


if __name__ == "__main__":
    ts.seed_everything(0)
    trainer = ts.Trainer(Graphs(), ts.TrainerArguments(epochs=15, train_batch_size=8, val_batch_size=8))
    trainer.train()
    assert trainer.history.get_latest_metric("val/accuracy") > 0.9
