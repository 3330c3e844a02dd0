"""A DictConfig, and its container, in `from_dict`."""

from omegaconf import OmegaConf

import trainstack as ts

if __name__ == "__main__":
    config = OmegaConf.create({"base": 16, "trainer": {"epochs": 3, "train_batch_size": "${base}", "writers": ["csv"]}})
    one = ts.TrainerArguments.from_dict(config.trainer)
    other = ts.TrainerArguments.from_dict(OmegaConf.to_container(config.trainer, resolve=True))
    assert one == other
    assert (one.epochs, one.train_batch_size, list(one.writers)) == (3, 16, ["csv"])
