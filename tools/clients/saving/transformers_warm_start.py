"""`init_weights_from` reads a folder of `save_pretrained`, its file, and a sharded index."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import trainstack as ts


def make(seed):
    ts.seed_everything(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16))


if __name__ == "__main__":
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(96).remainder(20).reshape(12, 8)]
    source = make(1)
    source.save_pretrained("whole")
    source.save_pretrained("sharded", max_shard_size="8KB")
    for place in ("whole", "whole/model.safetensors", "sharded", "sharded/model.safetensors.index.json"):
        model = make(2)
        module = ts.SupervisedModule(model, None, "sgd", rows, optimizer_kwargs={"lr": 0.0})
        trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=4, max_steps=1, init_weights_from=place))
        trainer.train()
        assert torch.equal(model.transformer.wte.weight, source.transformer.wte.weight), place
