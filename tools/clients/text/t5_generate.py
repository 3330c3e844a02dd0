"""T5 generates in `val_step`: sequences of different lengths are collected."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

import trainstack as ts


class Translator(ts.SupervisedModule):
    def val_step(self, global_step, batch, device):
        loss = self.model(**batch).loss
        limit = 3 + int(batch["input_ids"][0, 0]) % 3
        return {"loss": loss, "generated": self.model.generate(batch["input_ids"], max_length=limit, min_length=limit)}


if __name__ == "__main__":
    ts.seed_everything(0)
    config = T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, eos_token_id=1
    )
    rows = [{"input_ids": (torch.arange(6) + i) % 18 + 2, "labels": (torch.arange(4) + i) % 18 + 2} for i in range(12)]
    module = Translator(T5ForConditionalGeneration(config), None, "adafactor", rows, rows)
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=1, train_batch_size=4, val_batch_size=4))
    trainer.train()
    assert trainer.history.get_latest_metric("val/loss") > 0
    generated = trainer.validate()["default"]["generated"]
    assert sum(len(each) for each in generated) == 12 if isinstance(generated, list) else len(generated) == 12
