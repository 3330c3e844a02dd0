"""HfArgumentParser of transformers over TrainerArguments and a dataclass of the user's."""
# expected to fail: HfArgumentParser cannot read the annotations of TrainerArguments yet

from dataclasses import dataclass

from transformers import HfArgumentParser

import trainstack as ts


@dataclass
class ModelArguments:
    width: int = 8


if __name__ == "__main__":
    parser = HfArgumentParser((ModelArguments, ts.TrainerArguments))
    model, args = parser.parse_args_into_dataclasses(["--width", "4", "--epochs", "3", "--train_batch_size", "8"])
    assert (model.width, args.epochs, args.train_batch_size) == (4, 3, 8)
