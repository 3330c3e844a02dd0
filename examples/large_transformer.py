"""Fine-tune a transformer that does not fit into one process. Copy this file and change it.

    torchrun --nproc-per-node 2 examples/large_transformer.py
    trainstack plan examples/large_transformer.py:seven_billion --backend fsdp --world 8

Each process keeps a part of the parameters, gradients and optimizer states. The model is built on the meta device, so
that no process holds all of it, and gets its weights from a folder of `save_pretrained`, one tensor at a time. Here the
model is small, and the script writes the folder with random weights. `--pretrained` takes a folder with a real model.

The text is part of Python: the help topics of `help("for")`. It needs `pip install transformers`.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from trainstack import ModuleInterface, Trainer, TrainerArguments, main_process_first, seed_everything

LENGTH = 64  # characters of a sample


class FineTune(ModuleInterface):
    """Predicts the next character. Characters are ids from 0 to 127, and the model computes the loss."""

    def __init__(self, config):
        super().__init__()
        with torch.device("meta"):  # shapes without memory; data is made outside of this block
            self.model = AutoModelForCausalLM.from_config(config)
        enable = getattr(self.model, "activation_checkpointing_enable", None)  # its name since transformers 5.23
        (enable or self.model.gradient_checkpointing_enable)()  # blocks run again in the backward pass
        text = "\n".join(text for _, text in sorted(topics.items())).encode("ascii", errors="replace")
        self.rows = torch.tensor(list(text[: 512 * LENGTH])).view(-1, LENGTH)

    def get_train_dataloader(self, sampler, batch_size):
        return self.build_dataloader(self.rows, sampler, batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.AdamW(self.parameters(), lr=1e-3), ()  # here the parameters are sharded already

    def train_step(self, global_step, batch, device):
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss


def seven_billion():
    """A model of 7e9 parameters, for `trainstack plan`."""
    return FineTune(LlamaConfig())


def seventy_billion():
    """A model of 70e9 parameters, for `trainstack plan`."""
    return FineTune(
        LlamaConfig(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        )
    )


def small():
    """The configuration of a model that trains on two CPU cores."""
    return LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def write_pretrained(folder):
    """Write a small model with random weights, in several files as large models have them."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small()).save_pretrained(folder, max_shard_size="200KB")


def main():
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a transformer whose parameters are sharded.")
    parser.add_argument("--backend", default="fsdp", help="fsdp, fsdp-bf16, ddp, sp, ... (default: fsdp)")
    parser.add_argument("--pretrained", type=Path, help="a folder of save_pretrained (default: one is written)")
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/large_transformer"))
    given = parser.parse_args()
    pretrained = given.pretrained or given.output_dir / "pretrained"
    with main_process_first() as is_first:
        if given.pretrained is None and is_first:
            write_pretrained(pretrained)
    seed_everything(0)
    args = TrainerArguments(
        backend=given.backend,
        max_steps=given.max_steps,
        train_batch_size=24,
        gpu_batch_size_limit=12,
        output_dir=given.output_dir,
        init_weights_from=pretrained,
        resume="auto",
    )
    trainer = Trainer(FineTune(AutoConfig.from_pretrained(pretrained)), args)
    trainer.train()
    folder = given.output_dir / "fine-tuned"
    trainer.export(folder, part="model")
    if trainer.is_main_process:
        model = AutoModelForCausalLM.from_pretrained(folder)
        print(f"{folder} has a {type(model).__name__} of {sum(one.numel() for one in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
