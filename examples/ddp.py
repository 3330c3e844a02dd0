"""Train the digits of digits.py in several processes: the same class, the same global batch, another backend string.

    torchrun --nproc-per-node=2 examples/ddp.py
    torchrun --nproc-per-node=4 examples/ddp.py --resume

If the first was interrupted, the second continues from the newest checkpoint, here in four processes. The number of
processes has to divide the global batch of 64. With GPUs each process takes one, unless you write --device cpu.
"""

import argparse
from pathlib import Path

from digits import train


def main():
    """Train in each process; the main process prints the accuracy."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits, in several processes.")
    parser.add_argument("--backend", default="ddp", help="ddp, ddp-bf16 or ddp-amp (default: ddp)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/ddp"))
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in the output folder"
    )
    given = parser.parse_args()
    trainer = train(given.backend, given.epochs, given.output_dir, given.resume, device=given.device)
    accuracy = trainer.history.get_latest_metric("val/accuracy")  # over all the data, the same in each process
    trainer.print(f"validation accuracy {accuracy:.1%} over {trainer.world.size} processes")
    trainer.close()


if __name__ == "__main__":
    main()
