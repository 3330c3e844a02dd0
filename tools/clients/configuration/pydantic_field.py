"""TrainerArguments as a field of a pydantic model, with validation from a dict and its JSON schema."""

from pydantic import BaseModel

import trainstack as ts


class Experiment(BaseModel):
    name: str
    trainer: ts.TrainerArguments


if __name__ == "__main__":
    experiment = Experiment.model_validate({"name": "a", "trainer": {"epochs": 3, "train_batch_size": 8}})
    assert experiment.trainer.epochs == 3
    assert experiment.model_dump()["trainer"]["train_batch_size"] == 8
    assert "epochs" in str(Experiment.model_json_schema())
