"""A vision transformer of transformers on `pixel_values`, by keyword, in bfloat16 autocast."""

import torch
from datasets import Dataset
from transformers import ViTConfig, ViTForImageClassification

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    config = ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    data = Dataset.from_list([{"seed": i, "label": i % 3} for i in range(12)])

    def transform(rows):
        images = [torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in rows["seed"]]
        return {"pixel_values": images, "labels": rows["label"]}

    data = data.with_transform(transform)
    module = ts.SupervisedModule(ViTForImageClassification(config), None, "adamw", data, data)
    trainer = ts.Trainer(module, ts.TrainerArguments(backend="sp-bf16", epochs=2, train_batch_size=4, val_batch_size=4))
    trainer.train()
    assert trainer.global_steps_finished == 6
    assert trainer.validate()["default"]["outputs"]["logits"].shape == (12, 3)
