"""`TrainerArguments` in the parsers of other packages."""

import dataclasses
import json
import pickle
from typing import Any

import pytest

import trainstack as ts
from trainstack import TrainerArguments
from trainstack.errors import ConfigurationError


def test_jsonargparse_builds_arguments_from_options() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")

    def main(args: TrainerArguments, lr: float = 0.1) -> Any:
        return args, lr

    words = ["--args.epochs=3", "--args.checkpointer_args.keep_last=2", "--args.writers=[csv]", "--lr=.5"]
    args, lr = jsonargparse.CLI(main, args=words)
    assert type(args) is TrainerArguments
    assert (args.epochs, args.checkpointer_args.keep_last, args.writers, lr) == (3, 2, ("csv",), 0.5)


def test_pydantic_validates_and_serializes_arguments() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Model", trainer=(TrainerArguments, TrainerArguments()))
    made = model.model_validate({"trainer": {"epochs": 3, "checkpointer_args": {"keep_last": 2}}})
    assert made.trainer == TrainerArguments.from_dict({"epochs": 3, "checkpointer_args": {"keep_last": 2}})
    assert model.model_validate_json(made.model_dump_json()).trainer == made.trainer
    assert "epochs" in model.model_json_schema()["properties"]["trainer"]["properties"]
    assert pydantic.TypeAdapter(TrainerArguments).json_schema()["type"] == "object"
    with pytest.raises(pydantic.ValidationError, match="Write epochs"):
        model.model_validate({"trainer": {"max_epochs": 3}})


def test_omegaconf_reads_the_plain_fields() -> None:
    omegaconf = pytest.importorskip("omegaconf").OmegaConf
    words = ["checkpointer_args__keep_last=2", "epochs=3", "max_steps=0.5", "clip_grads=false"]
    config = omegaconf.merge(omegaconf.structured(ts.ParserArguments), omegaconf.from_dotlist(words))
    args = omegaconf.to_object(config).to_arguments()
    assert (args.epochs, args.max_steps, args.checkpointer_args.keep_last, args.clip_grads) == (3, 0.5, 2, False)
    assert omegaconf.to_object(omegaconf.structured(ts.ParserArguments)).to_arguments() == TrainerArguments()


def test_hf_argument_parser_reads_the_plain_fields() -> None:
    parser = pytest.importorskip("transformers").HfArgumentParser(ts.ParserArguments)
    words = ["--epochs", "3", "--max_steps", "10", "--writers", "[csv]", "--use_gpu", "False", "--monitor_mode", "max"]
    (parsed,) = parser.parse_args_into_dataclasses([*words, "--monitor", "val/accuracy"])
    args = parsed.to_arguments()
    assert (args.epochs, args.max_steps, args.writers, args.use_gpu) == (3, 10, ("csv",), False)
    assert (args.monitor, args.monitor_mode) == ("val/accuracy", "max")


def test_a_wrong_plain_value_names_its_field() -> None:
    with pytest.raises(ConfigurationError, match="max_steps=many"):
        ts.ParserArguments(max_steps="many").to_arguments()
    with pytest.raises(ConfigurationError, match="epochs"):
        ts.ParserArguments(epochs=-1).to_arguments()


def test_nested_mappings_become_arguments() -> None:
    args = TrainerArguments(checkpointer_args={"keep_last": 2}, validate_every={"epochs": 2})  # type: ignore[arg-type]
    assert args.checkpointer_args.keep_last == 2
    assert args.validate_every == ts.Every(epochs=2)
    assert pickle.loads(pickle.dumps(args)) == args
    with pytest.raises(ConfigurationError, match="keep_lost"):
        TrainerArguments(checkpointer_args={"keep_lost": 2})  # type: ignore[arg-type]


def test_the_schema_describes_each_field() -> None:
    schema = TrainerArguments.to_json_schema()
    json.dumps(schema)
    fields = schema["properties"]
    assert set(fields) == {field.name for field in dataclasses.fields(TrainerArguments)}
    assert fields["epochs"] == {"type": "integer", "description": "passes over the training data.", "default": 1}
    assert {"enum": ["auto"]} in fields["report"]["anyOf"]
    nested = next(one for one in fields["differential_privacy_args"]["anyOf"] if "properties" in one)
    assert "delta" in nested["properties"]
    assert not schema["additionalProperties"]
