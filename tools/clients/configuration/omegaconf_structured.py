"""ParserArguments, the flat form of TrainerArguments, as a structured config that OmegaConf checks."""

from omegaconf import OmegaConf

import trainstack as ts

if __name__ == "__main__":
    config = OmegaConf.merge(OmegaConf.structured(ts.ParserArguments), OmegaConf.from_dotlist(["epochs=3"]))
    parsed: ts.ParserArguments = OmegaConf.to_object(config)  # type: ignore[assignment]
    args = parsed.to_arguments()
    assert args.epochs == 3
