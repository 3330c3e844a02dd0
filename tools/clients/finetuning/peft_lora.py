"""LoRA on a causal language model with `task_type`, with an average of the weights; only the adapter is trained."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(96).remainder(20).reshape(12, 8)]
    module = ts.SupervisedModule(model, None, "adamw", rows, optimizer_kwargs={"lr": 0.01})
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=2, train_batch_size=4), callbacks=[ts.callbacks.EMA(0.9)])
    trainer.train()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora" in name for name in moved)
    model.save_pretrained("adapter")
    merged = model.merge_and_unload()
    assert type(merged).__name__ == "GPT2LMHeadModel"
