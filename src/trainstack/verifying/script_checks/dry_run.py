"""`collect` trains a few steps of a module without a trace, and returns the facts that checks judge."""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainstack.backends.losses import find_loss
from trainstack.backends.spec import parse_spec, registered_backend
from trainstack.checkpointing import DefaultCheckpointerArguments
from trainstack.trainer import Callback, ModuleInterface, Trainer, TrainerArguments
from trainstack.trainer.core.untracked import changed_attributes, fingerprints
from trainstack.trainer.data.step_batches import unsupported_order_reason
from trainstack.verifying.determinism.user_sources import SourceWatch
from trainstack.verifying.script_checks.evidence import (
    Evidence,
    digest,
    holds_generator,
    map_tensors,
    random_state_kept,
    read_samples,
    tensors_of,
)
from trainstack.verifying.script_checks.sources import Source
from trainstack.verifying.script_checks.watching import CallWatch, FirstLayer, largest_gradients

_KEPT_BATCHES = 2
_CPU = torch.device("cpu")


class _Enough(Exception):
    """Ends the dry run after its last step."""


def dry_arguments(args: TrainerArguments, folder: Path) -> TrainerArguments:
    """`args` for a training of one process that writes nothing outside of `folder`.

    Epochs and steps stay, so that schedules and intervals are judged by those of the run.
    """
    backend, kept = "sp", set[str]()
    if registered_backend(args.backend) is None:
        layers = [one for one in parse_spec(args.resolved_backend) if not one.layer.joins_processes]
        tokens = [one.token for one in layers if not one.layer.private and one.token not in ("sp", "amp-apex")]
        backend, kept = "-".join(["sp", *tokens]), set(tokens)
    return replace(
        args,
        backend=backend,
        backend_options={key: value for key, value in args.backend_options.items() if key in kept},
        distributed_training_args=None,
        differential_privacy_args=None,
        amp_backend_apex=False,
        device="cpu" if args.device == "auto" else args.device,
        compile=False,
        fast_paths=False,
        fast_dev_run=False,
        fit_micro_batch=False,
        validate_at_start=False,
        sanity_val_steps=0,
        validate_every=0,
        max_val_steps_per_epoch=_KEPT_BATCHES,
        verify_replay=0.0,
        log_every=1,
        resume=False,
        init_weights_from=None,
        output_dir=folder,
        local_dir=None,
        overwrite=False,
        writer_args=None,
        checkpointer_args=replace(DefaultCheckpointerArguments(), checkpoint=False),
        writers=(),
        report=False,
        record="off",
        progress="none",
        default_callbacks=False,
        handle_signals=False,
        save_on_exception=False,
        log_level="INFO",
    )


class _Watcher(Callback):
    """Fills the evidence in the steps of the dry run."""

    expects_all_events = False

    def __init__(self, evidence: Evidence, steps: int, watch: CallWatch) -> None:
        self._evidence, self._steps, self._watch = evidence, steps, watch
        self._marks: Mapping[str, str] = {}
        self._now: tuple[dict[str, float], float] = ({}, 0.0)

    def on_train_epoch_begin(self, trainer: Any) -> None:
        evidence = self._evidence
        evidence.plan, evidence.loader = trainer.plan, trainer._run.data.loader
        evidence.optimizers, evidence.schedulers = trainer.optimizers, trainer.schedulers
        self._marks = fingerprints(trainer.module)

    def on_train_batch_begin(self, trainer: Any, batch: Any) -> None:
        self._watch.stage = "train"
        if len(self._evidence.batches) < _KEPT_BATCHES:
            self._evidence.batches.append(map_tensors(batch, lambda one: one.detach().to("cpu", copy=True)))

    def on_train_batch_end(self, trainer: Any, batch: Any, outputs: Any, loss: Tensor) -> None:
        self._watch.stage = ""
        self._evidence.losses.append(float(loss.detach()))
        grads = [p.grad.detach().float().norm() for p in trainer.module.parameters() if p.grad is not None]
        self._now = (dict(largest_gradients(trainer.module)), float(torch.stack(grads).norm()) if grads else 0.0)

    def on_train_step_end(self, trainer: Any, step: int) -> None:
        self._watch.stage = ""
        gradients, norm = self._now  # of the last micro-batch, which has those of the others, before clipping
        self._evidence.gradients.append(gradients)
        self._evidence.gradient_norms.append(norm)
        if step >= self._steps:
            raise _Enough

    def end(self, trainer: Trainer) -> None:
        """Note the attributes that training has changed outside of the states."""
        with suppress(Exception):
            changed = changed_attributes(trainer.module, self._marks)
            kept = set(map(str, trainer.module.get_state()))
            self._evidence.changed = [name for name in changed if name not in kept]


class _Messages(logging.Handler):
    def __init__(self, into: list[tuple[int, str]]) -> None:
        super().__init__(logging.INFO)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append((record.levelno, record.getMessage()))


@contextmanager
def _messages_into(evidence: Evidence) -> Iterator[None]:
    """A block whose messages of the library and warnings of Python go into the evidence, and not to the screen."""
    logger = logging.getLogger("trainstack")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    logger.handlers[:] = [_Messages(evidence.messages)]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    frames = SourceWatch()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
        for one in caught:
            of_user = frames.is_of_user(compile("", one.filename, "exec")) if one.filename else False
            place = f"{os.path.basename(one.filename)}:{one.lineno}" if of_user else ""
            evidence.warnings.append((str(one.message), place))


def collect(
    module: ModuleInterface, args: TrainerArguments, source: Source | None, steps: int = 3, **given: Any
) -> Evidence:
    """Train `steps` global steps of `module` and evaluate two batches of each validation loader.

    Args:
        module: is trained, and not used otherwise afterwards.
        args: of the run that the script would make.
        source: the file of the user.
        steps: the number of global steps; fewer if the data has fewer.
        **given: further arguments of the trainer: `train_step`, `val_step` and `metrics`.
    """
    evidence = Evidence(module, args, source)
    with tempfile.TemporaryDirectory(prefix="trainstack-doctor-") as folder, _messages_into(evidence):
        with ExitStack() as stack:
            before = _copy_of(module)
            watch = CallWatch()
            watcher = _Watcher(evidence, steps, watch)
            first = FirstLayer(module)
            stack.callback(first.close)
            try:
                trainer = Trainer(module, dry_arguments(args, Path(folder)), callbacks=[watcher], **given)
                with watch:
                    _train(trainer, watcher, watch)
                    first.close()
                    watch.stage = "val"
                    _validate(trainer, evidence)
            except Exception as error:
                evidence.error = error
            evidence.calls, evidence.layer_input = watch.calls, first.seen
        _read_data(evidence)
        if before is not None and evidence.error is None and not given.get("train_step"):
            messages = len(evidence.messages)
            _ask_loss(evidence, before)
            del evidence.messages[messages:]  # such as that no trainer runs the copy
    return evidence


def _copy_of(module: ModuleInterface) -> ModuleInterface | None:
    """A copy with the same data sets; None where the module cannot be copied, such as with an open file."""
    memo = {id(value): value for value in vars(module).values() if isinstance(value, Dataset | DataLoader)}
    try:
        return copy.deepcopy(module, memo)
    except Exception:
        return None


def _train(trainer: Trainer, watcher: _Watcher, watch: CallWatch) -> None:
    with suppress(_Enough):
        trainer.train()
    watch.stage = ""
    watcher.end(trainer)


def _validate(trainer: Trainer, evidence: Evidence) -> None:
    loaders = trainer.module.get_val_dataloaders(_Plain, trainer.args.val_batch_size or 1)
    if loaders is None:
        return
    evidence.val_loaders = loaders if isinstance(loaders, dict) else {"default": loaders}
    trainer.validate(log=True, keep_outputs=False)
    evidence.metrics = set(trainer.history.get_metric_names())


class _Plain(torch.utils.data.SequentialSampler):
    """The sampler that the module is given."""


def _read_data(evidence: Evidence) -> None:
    loader = evidence.loader
    evidence.samples = read_samples(loader)
    evidence.val_samples = {name: read_samples(one) for name, one in evidence.val_loaders.items()}
    if not evidence.samples or unsupported_order_reason(loader) is not None or holds_generator(loader.dataset):
        return
    for index in list(evidence.samples)[:4]:
        with suppress(Exception):
            if len({_digest_of(loader.dataset, index) for _ in range(3)}) > 1:
                evidence.unstable = index
                return


def _digest_of(dataset: Any, index: int) -> Any:
    with random_state_kept():
        return digest(dataset[index])


def _ask_loss(evidence: Evidence, module: ModuleInterface) -> None:
    """Compute the loss of the first batch with changed items, and with the weights after the dry run."""
    if not evidence.batches:
        return
    batch = evidence.batches[0]
    with suppress(Exception):
        for one in (module, evidence.module):  # with weights of 0 at the start, the loss depends on no input
            base = _loss(one, batch)
            if base != _loss(one, batch):
                return  # it depends on more than the batch
            for name, changed in _changed_batches(batch):
                evidence.responses[name] = evidence.responses.get(name, False) or _loss(one, changed) != base
        evidence.first_loss_again = base


def _loss(module: ModuleInterface, batch: Any) -> float:
    module.to(_CPU)
    with random_state_kept():
        outputs = module.train_step(global_step=1, batch=map_tensors(batch, torch.clone), device=_CPU)
    return float(find_loss(outputs).detach())


def _changed_batches(batch: Any) -> Iterator[tuple[str, Any]]:
    """`batch` with one tensor changed at a time: floating values by noise, whole numbers within their range."""
    tensors = tensors_of(batch)
    for position, tensor in enumerate(tensors):
        changed = _changed(tensor)
        if changed is None:
            continue
        yield _name_of(batch, tensor, position), map_tensors(batch, partial(_replaced, tensor, changed))


def _replaced(old: Tensor, new: Tensor, one: Tensor) -> Tensor:
    return new if one is old else one


def _name_of(batch: Any, tensor: Tensor, position: int) -> str:
    if isinstance(batch, Mapping):
        return next((repr(name) for name, value in batch.items() if value is tensor), f"tensor {position}")
    return f"item {position}"


def _changed(tensor: Tensor) -> Tensor | None:
    """Another tensor of the same kind; None where all values are equal."""
    if tensor.layout is not torch.strided or tensor.numel() < 2 or bool((tensor == tensor.flatten()[0]).all()):
        return None
    if tensor.dtype is torch.bool:
        return ~tensor
    if tensor.is_floating_point():
        generator = torch.Generator().manual_seed(1)
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * tensor.std() + tensor.mean()
    return tensor.max() + tensor.min() - tensor
