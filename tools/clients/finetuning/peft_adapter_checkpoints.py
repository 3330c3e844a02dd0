"""Checkpoints with only the adapter, and a resume from one."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import trainstack as ts


def train(epochs, folder):
    ts.seed_everything(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_embd=64, n_layer=1, n_head=2, n_positions=16))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(96).remainder(20).reshape(12, 8)]
    module = ts.SupervisedModule(model, None, "adamw", rows, optimizer_kwargs={"lr": 0.01})
    checkpoints = ts.DefaultCheckpointerArguments(keep_frozen=False)
    args = ts.TrainerArguments(
        epochs=epochs, train_batch_size=4, output_dir=folder, resume="auto", checkpointer_args=checkpoints
    )
    ts.Trainer(module, args).train()
    return model.state_dict()


if __name__ == "__main__":
    whole = train(2, "whole")
    train(1, "parts")
    resumed = train(2, "parts")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    size = sum(file.stat().st_size for file in Path("parts/checkpoints/last").resolve().rglob("*") if file.is_file())
    assert size < 500 * 64 * 4  # the embedding would be larger
