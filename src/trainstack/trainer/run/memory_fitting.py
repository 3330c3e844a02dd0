"""`fit_micro_batch` halves the micro-batch until a step fits into memory."""

from __future__ import annotations

import gc

import torch

from trainstack.backends import Workload
from trainstack.backends.losses import find_loss
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.several_updates import yields_updates
from trainstack.trainer.core.shards import has_shards
from trainstack.trainer.data.library_orders import LengthGroupedSampler
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.run.trial import restore_after


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised `error`. torch has a class for accelerators; other allocators have only messages."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    sentences = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sentence in str(error) for sentence in sentences)


def fit_micro_batch(context: RunContext, data: TrainingData, work: Workload) -> None:
    """Halve the micro-batch of a run until one forward and backward pass fits on every process.

    All processes call it together. The gradient of a global batch does not depend on its split, so the result of the
    run does not change. The trial also allocates two tensors for each parameter, as the states of Adam need. It uses
    the first samples of the data set; if others are larger, set `gpu_batch_size_limit`.

    Raises:
        ConfigurationError: the library does not know the samples of the training loader, the run is private, or
            the module is sharded.
        torch.OutOfMemoryError: not even one sample fits.
    """
    problem = data.training_set.problem
    if yields_updates(work.module):
        raise ConfigurationError(
            "fit_micro_batch=True: train_step yields, and its parts cannot be tested without the updates between them. "
            "Write gpu_batch_size_limit=... instead."
        )
    if context.stack.is_private or problem is not None:
        why = "the run is private, and its batches are sampled for each step" if problem is None else problem
        raise ConfigurationError(
            f"fit_micro_batch=True: batches cannot be tested: {why}. Write gpu_batch_size_limit=... instead."
        )
    if has_shards(work.module):
        raise ConfigurationError(
            "fit_micro_batch=True: each pass of a sharded module waits for all processes, so they would wait forever "
            "for a process without memory. Write gpu_batch_size_limit=... instead."
        )
    first = data.plan.micro_batch
    while not _fits_everywhere(context, data, work):
        data.set_plan(data.plan.with_micro_batch(max(1, data.plan.micro_batch // 2)))
    plan = data.plan
    if plan.micro_batch != first:
        context.log.warning(
            f"a micro-batch of {first} does not fit into memory: each step is split into {plan.accumulation} of "
            f"{plan.micro_batch}, with the same result. To skip the search, write gpu_batch_size_limit="
            f"{plan.micro_batch}."
        )


def _fits_everywhere(context: RunContext, data: TrainingData, work: Workload) -> bool:
    error: Exception | None = None
    world = context.world
    try:
        _try_once(context, data, work)
    except Exception as raised:
        if not ran_out_of_memory(raised):
            raise
        error = raised.with_traceback(None)  # the traceback references the tensors of the pass
    gc.collect()
    if world.device.type != "cpu":
        torch.get_device_module(world.device).empty_cache()
    if not any(world.comm.gather(error is not None, "fit_micro_batch")):
        return True
    if data.plan.micro_batch == 1:
        world.comm.raise_if_any(error, "a step with a single sample")
    return False


def _try_once(context: RunContext, data: TrainingData, work: Workload) -> None:
    """Run one pass that changes no state and communicates with no other process."""
    stack, step = context.stack, context.state.global_step + 1
    samples = data.training_set
    with restore_after(context, work, mix(context.state.seed, step), "fit_micro_batch=True"):
        chosen = torch.arange(min(data.plan.micro_batch, samples.length or 1))
        sampler = getattr(data.loader, "sampler", None)
        if isinstance(sampler, LengthGroupedSampler):  # one batch contains the longest samples
            chosen = sampler.lengths.topk(len(chosen)).indices
        batch = samples.fetch(chosen)
        kept = [torch.empty_like(p) for p in work.optimized_params for _ in range(2)]
        with stack.accumulate(work, False):
            stack.backward(work, find_loss(stack.forward(work, Stage.TRAIN, batch, step)), 1.0)
        del kept
