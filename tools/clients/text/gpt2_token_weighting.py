"""A causal language model with padding: the split of a batch does not change the weights, tokens count."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import trainstack as ts


def train(limit):
    ts.seed_everything(0)
    config = GPT2Config(
        vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    rows = []
    for i in range(16):
        ids = torch.randint(1, 20, (8,))
        used = 3 + i % 6
        mask = (torch.arange(8) < used).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)})
    module = ts.SupervisedModule(GPT2LMHeadModel(config), None, "sgd", rows, optimizer_kwargs={"lr": 0.5})
    ts.Trainer(module, ts.TrainerArguments(epochs=2, train_batch_size=8, gpu_batch_size_limit=limit)).train()
    return torch.cat([p.detach().flatten() for p in module.model.parameters()])


if __name__ == "__main__":
    torch.testing.assert_close(train(8), train(2), rtol=1e-4, atol=1e-5)
