"""Tied weights are saved once, resumed exactly, and tied again; gradient checkpointing is on."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import trainstack as ts


def train(folder, epochs, resume=False):
    ts.seed_everything(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    model.gradient_checkpointing_enable()
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(96).remainder(20).reshape(12, 8)]
    module = ts.SupervisedModule(model, None, "adamw", rows)
    args = ts.TrainerArguments(epochs=epochs, train_batch_size=4, output_dir=folder, resume=resume)
    ts.Trainer(module, args).train()
    assert model.lm_head.weight is model.transformer.wte.weight
    return model.state_dict()


if __name__ == "__main__":
    whole = train("whole", 2)
    train("parts", 1)
    resumed = train("parts", 2, resume="auto")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
