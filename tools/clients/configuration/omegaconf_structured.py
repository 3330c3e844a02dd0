"""TrainerArguments as a structured config of OmegaConf, with type checks by OmegaConf."""
# expected to fail: the unions in the annotations of TrainerArguments are not read by OmegaConf yet

from omegaconf import OmegaConf

import trainstack as ts

if __name__ == "__main__":
    config = OmegaConf.merge(OmegaConf.structured(ts.TrainerArguments), OmegaConf.from_dotlist(["epochs=3"]))
    args = ts.TrainerArguments.from_dict(config)
    assert args.epochs == 3
