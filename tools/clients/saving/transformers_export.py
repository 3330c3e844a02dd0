"""`export(part="model")` of a model of transformers is a folder that `from_pretrained` reads."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(96).remainder(20).reshape(12, 8)]
    trainer = ts.Trainer(ts.SupervisedModule(model, None, "adamw", rows), ts.TrainerArguments(train_batch_size=4))
    trainer.train()
    trainer.export("exported", part="model")
    loaded = AutoModelForCausalLM.from_pretrained("exported")
    ids = torch.arange(8)[None]
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
