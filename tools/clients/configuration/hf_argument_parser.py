"""HfArgumentParser of transformers over ParserArguments, the flat form of TrainerArguments, and a user's dataclass."""

from dataclasses import dataclass

from transformers import HfArgumentParser

import trainstack as ts


@dataclass
class ModelArguments:
    width: int = 8


if __name__ == "__main__":
    parser = HfArgumentParser((ModelArguments, ts.ParserArguments))
    model, parsed = parser.parse_args_into_dataclasses(["--width", "4", "--epochs", "3", "--train_batch_size", "8"])
    args = parsed.to_arguments()
    assert (model.width, args.epochs, args.train_batch_size) == (4, 3, 8)
