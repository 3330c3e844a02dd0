"""Whisper on spectrograms with labels."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    config = WhisperConfig(
        vocab_size=30,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    rows = [{"input_features": torch.rand(8, 40), "labels": torch.randint(3, 30, (6,))} for _ in range(8)]
    module = ts.SupervisedModule(WhisperForConditionalGeneration(config), None, "adamw", rows, rows)
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=3, train_batch_size=4, val_batch_size=4))
    trainer.train()
    losses = trainer.history.get_metric_values("val/loss")
    assert losses[-1] < losses[0]
