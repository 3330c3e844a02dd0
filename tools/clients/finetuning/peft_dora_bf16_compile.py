"""DoRA under bfloat16 autocast, compiled."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    config = BertConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    lora = LoraConfig(r=2, use_dora=True, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = get_peft_model(BertForSequenceClassification(config), lora)
    rows = [{"input_ids": torch.tensor([2 + i % 2, 4, 5]), "labels": i % 2} for i in range(8)]
    module = ts.SupervisedModule(model, None, "adamw", rows, rows, optimizer_kwargs={"lr": 0.01})
    args = ts.TrainerArguments(
        backend="sp-bf16", epochs=4, train_batch_size=4, val_batch_size=4, compile={"backend": "aot_eager"}
    )
    trainer = ts.Trainer(module, args)
    trainer.train()
    losses = trainer.history.get_metric_values("val/loss")
    assert losses[-1] < losses[0]
    assert not any("_orig_mod" in name for name in module.state_dict())
