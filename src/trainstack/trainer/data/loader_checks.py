"""Checks of the training loader, and warnings about it."""

from __future__ import annotations

import random
from typing import Any

from trainstack.backends.random_streams import RandomStreams
from trainstack.errors import ConfigurationError, ModuleContractError, PrivacyError
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.random_state import Seed
from trainstack.trainer.data.library_orders import LengthGroupedSampler, unequal_lengths
from trainstack.trainer.data.own_generators import can_be_seeded, own_generators
from trainstack.trainer.data.step_batches import unsupported_order_reason
from trainstack.trainer.module_interface import ModuleInterface


def warn_of_no_length(plan: TrainingPlan, log: RunLogger) -> None:
    """Warn if the number of steps of an epoch is unknown."""
    if plan.steps_per_epoch is None and plan.max_steps is None and plan.max_steps_per_epoch is None:
        log.warning(
            "the training loader has no length, so the number of steps of an epoch is unknown: "
            f"get_optimizers_schedulers gets {plan.estimated_global_steps_per_epoch}. Set max_steps or "
            "max_train_steps_per_epoch to plan with a number."
        )


def warn_of_unseedable(loader: Any, seed: Seed, log: RunLogger) -> None:
    """Warn of random generators of `loader` that cannot be seeded from `seed`.

    Raises:
        PrivacyError: there is one, and the run is private.
    """
    found = own_generators(loader).search()
    draws_from_system = isinstance(seed, RandomStreams) and seed.is_secret
    paths = [
        path
        for path, one in found.without_state.items()
        if not (draws_from_system and isinstance(one, random.SystemRandom))
    ]
    paths += [path for path, one in found.by_path.items() if not can_be_seeded(one)]
    if found.unsearched:
        log.warning(
            f"{found.describe_unsearched()}: too large or too deep to be searched completely for random generators. "
            "Generators that were not found are not seeded, so a resume may draw other samples. Keep the generators in "
            "attributes of the data set."
        )
    if paths and isinstance(seed, RandomStreams):
        raise PrivacyError(
            f"{', '.join(paths)} cannot be seeded from the operating system, so the random numbers of samples may "
            "not be secret. Use numpy.random.default_rng(), random.Random() or torch.Generator()."
        )
    if paths:
        log.warning(
            f"{', '.join(paths)} cannot be seeded: samples depend on its earlier random numbers, and differ after a "
            "resume and with another number of workers. Use numpy.random.default_rng(), random.Random() or "
            "torch.Generator(), which the library seeds for each sample."
        )


def check_plan(module: ModuleInterface, plan: TrainingPlan) -> None:
    """Refuse to split batches if the module forbids it with `splits_batches`.

    Raises:
        ConfigurationError: the plan splits them.
    """
    splits = getattr(module, "splits_batches", True)
    if not isinstance(splits, bool):
        raise ConfigurationError(
            f"{type(module).__name__}.splits_batches is {splits!r}. Write False if its batches must not be "
            "split, or True."
        )
    if plan.accumulation > 1 and not splits:
        raise ConfigurationError(
            f"{type(module).__name__}.splits_batches is False, and a step of {plan.process_batch} samples on "
            f"each process would be split into {plan.accumulation} micro-batches of at most {plan.micro_batch}. "
            "Write gpu_batch_size_limit=None and fit_micro_batch=False, or a smaller train_batch_size."
        )


def warn_of_small_parts(loader: Any, plan: TrainingPlan, limit: int | None, log: RunLogger) -> None:
    """Warn if the parts of a step have very different sizes."""
    last = plan.last_micro_batch
    if limit is None or last == plan.micro_batch or plan.is_sampled:
        return
    whole = f"gpu_batch_size_limit={limit} splits the {plan.process_batch} samples of a step on each process into"
    if unsupported_order_reason(loader) is None:
        if 4 * last < limit:  # statistics over less than a quarter of the batch differ noticeably
            log.warning(
                f"{whole} {plan.accumulation} micro-batches, of which the last has {last}. Its weight is right, but "
                "batch norm and other parts that use statistics of a batch get few samples. Write "
                f"train_batch_size={(plan.process_batch - last) * plan.world_size}."
            )
    elif loader is not None:
        log.warning(
            f"{whole} batches of {plan.micro_batch}, the last of {last}, but each batch of a loader with a custom "
            f"order has {plan.micro_batch}: a step has {plan.accumulation * plan.micro_batch * plan.world_size} "
            f"samples instead of {plan.global_batch}. Write a gpu_batch_size_limit that divides the batch."
        )


def check_sampler(loader: Any, *, is_sampled: bool) -> None:
    """Refuse a sampler whose order the library cannot make.

    Raises:
        ModuleContractError: its sampler is a class, or has another length than the data.
        PrivacyError: it groups samples by length in a private run, `is_sampled`.
    """
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, type):
        raise ModuleContractError(
            "get_train_dataloader gave the DataLoader the sampler class itself. Call it with the data set: "
            "DataLoader(dataset, batch_size=batch_size, sampler=sampler(dataset))."
        )
    if not isinstance(sampler, LengthGroupedSampler):
        return
    if is_sampled:
        raise PrivacyError(
            "a private run draws each record at random, independently of the others, so its batches cannot be "
            "grouped by length. Write sampler=sampler(dataset) with the `sampler` argument of get_train_dataloader."
        )
    if len(sampler) != len(loader.dataset):
        raise unequal_lengths(len(sampler), len(loader.dataset))
