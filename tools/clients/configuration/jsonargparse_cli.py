"""A command line by jsonargparse with TrainerArguments as a group of options."""

from jsonargparse import ArgumentParser

import trainstack as ts

if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_class_arguments(ts.TrainerArguments, "trainer")
    parser.add_argument("--lr", type=float, default=0.1)
    config = parser.parse_args(["--trainer.epochs=3", "--trainer.train_batch_size=8", "--lr=0.2"])
    made = parser.instantiate_classes(config)
    assert isinstance(made.trainer, ts.TrainerArguments)
    assert (made.trainer.epochs, made.lr) == (3, 0.2)
