"""DPO as in trl: a frozen reference in eval mode, and the trained model."""

import copy

import torch
from torch.nn.functional import logsigmoid
from transformers import GPT2Config, GPT2LMHeadModel

import trainstack as ts


def log_probability(model, ids):
    logits = model(ids).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


class Dpo(ts.ModuleInterface):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.reference = copy.deepcopy(model).eval().requires_grad_(False)
        self.modes = set()

    def get_train_dataloader(self, sampler, batch_size):
        rows = [{"chosen": torch.arange(2, 8), "rejected": torch.arange(8, 2, -1)} for _ in range(8)]
        return self.build_dataloader(rows, sampler, batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3), None

    def train_step(self, global_step, batch, device):
        self.modes.add((self.model.training, self.reference.training))
        margins = [log_probability(self.model, ids) - log_probability(self.reference, ids) for ids in batch.values()]
        return -logsigmoid(0.1 * (margins[0] - margins[1])).mean()


if __name__ == "__main__":
    ts.seed_everything(0)
    module = Dpo(GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=8)))
    before = copy.deepcopy(module.reference.state_dict())
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=4, train_batch_size=4))
    trainer.train()
    assert module.modes == {(True, False)}
    assert all(torch.equal(value, before[name]) for name, value in module.reference.state_dict().items())
    losses = trainer.history.get_metric_values("train/loss_epoch")
    assert losses[-1] < losses[0]
