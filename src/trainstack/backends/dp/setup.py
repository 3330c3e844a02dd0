"""Setup of a private run: checks, plan, gradient mode, mechanism."""

from __future__ import annotations

import hashlib
import secrets
from os import PathLike
from typing import Any

from torch import Tensor

from trainstack.backends.dp.arguments import DifferentialPrivacyArguments, PrivacyPlan, plan_privacy
from trainstack.backends.dp.budget import open_accountant
from trainstack.backends.dp.checks import choose_probe_records, neighbour_problems, setup_problems, static_problems
from trainstack.backends.dp.clipping import AdaptiveClipper, AutomaticClipper, Clipper, FlatClipper, per_layer_clipper
from trainstack.backends.dp.forward_randomness import ForwardRandomness
from trainstack.backends.dp.mechanism import Mechanism
from trainstack.backends.dp.modes.base import GradientMode, Run
from trainstack.backends.dp.modes.selection import choose_mode
from trainstack.backends.dp.randomness import DebugRandomness, Randomness, SeededRandomness, SystemRandomness
from trainstack.backends.dp.sampling import PoissonSampling, check_records
from trainstack.backends.dp.sealed.plain_state import installed_attributes, owners_of
from trainstack.backends.dp.sealed.sample_replay import mixed_records
from trainstack.backends.dp.statement import EXPOSED, SEEDED, option_notes
from trainstack.backends.dp.telemetry import Telemetry
from trainstack.backends.processes.communicator import Communicator
from trainstack.backends.processes.packing import broadcast_coalesced
from trainstack.backends.random_streams import RandomStreams
from trainstack.backends.single_process import move_to_device
from trainstack.backends.workload import TrainingSet, Workload
from trainstack.errors import ConfigurationError, PrivacyError


def make_mechanism(
    work: Workload,
    args: DifferentialPrivacyArguments,
    ledger: str | PathLike[str] | None,
    run: Run,
    streams: RandomStreams,
) -> Mechanism:
    """Everything for the private steps of a run, the same on all its processes.

    Args:
        work: placed on its device, not wrapped.
        args: of the run.
        ledger: records the steps unless `args.ledger` names another one; on the main process only.
        run: runs the module on a batch as the layers inside do.
        streams: of the random numbers in forward passes.

    Raises:
        PrivacyError: all reasons for which the guarantee would not hold, each with advice.
    """
    faults, seen = setup_problems(work, args), static_problems(work)
    if faults or (seen and args.on_unsafe == "error"):
        raise _refusal(*faults, *seen)
    assert work.data is not None
    comm = work.world.comm
    plan = _plan(work.data, args)
    _agree_on(comm, work, plan, args)
    broadcast_coalesced(work.world, [*work.module.parameters(), *work.module.buffers()])
    mode, found = _mode(work, work.data, args, plan, run)
    if found and args.on_unsafe == "error":
        mode.close()
        raise _refusal(*found)
    accountant = open_accountant(work, plan, args, ledger)
    accountant.overrides = (*seen, *found, *((SEEDED,) if args.debug_seed is not None else ()))
    accountant.notes = option_notes(args)
    accountant.overrides += (EXPOSED,) if args.expose_records else ()
    randomness = _randomness(args, comm)
    records = work.data.length or 0
    sampling = PoissonSampling(
        records=records,
        rate=plan.sample_rate,
        world=work.world,
        rank_key=_shared_key(args, comm, "sharing out records"),
        randomness=randomness,
        steps_allowed=accountant.steps_allowed,
        exhausted_reason=accountant.exhausted_reason,
        discard=lambda: mechanism.discard(),  # bound below: each of the two needs the other
    )
    forward, world = _forward_randomness(work, args, streams, sampling), work.world
    parts: dict[str, Any] = {"mode": mode, "forward_randomness": forward, "sampling": sampling}
    mechanism = Mechanism(args=args, accountant=accountant, world=world, randomness=randomness, **parts)
    return mechanism


def _forward_randomness(
    work: Workload, args: DifferentialPrivacyArguments, streams: RandomStreams, sampling: PoissonSampling
) -> ForwardRandomness:
    def records(step: int) -> Tensor:
        return sampling.draw(step).local

    return ForwardRandomness(work.module, work.world.device, streams, debug_seed=args.debug_seed, records=records)


def _plan(data: TrainingSet, args: DifferentialPrivacyArguments) -> PrivacyPlan:
    assert data.length is not None
    assert data.total_steps is not None  # both were looked at
    try:
        plan = plan_privacy(
            args, expected_batch_size=data.global_batch, dataset_size=data.length, steps=data.total_steps
        )
    except ConfigurationError as error:
        raise _refusal(str(error)) from error
    counted = args.count_noise_multiplier
    if counted is not None and plan.noise_multiplier >= 2 * counted:
        raise _refusal(
            f"count_noise_multiplier={counted}: the count of unclipped records would spend more than the whole step, "
            f"whose noise multiplier is {plan.noise_multiplier:.4g}. Write more than {plan.noise_multiplier / 2:.4g}, "
            "or remove it."
        )
    return plan


def _mode(
    work: Workload, data: TrainingSet, args: DifferentialPrivacyArguments, plan: PrivacyPlan, run: Run
) -> tuple[GradientMode, list[str]]:
    """The gradient mode, and the findings of the neighbour probe."""
    trained = tuple(p for p in work.optimized_params if p.requires_grad)
    names = {id(p): name for name, p in work.module.named_parameters()}
    was_training = {part: part.training for part in work.module.modules()}
    work.module.train()
    try:
        clipper = _clipper(args, [names[id(p)] for p in trained])
        chosen = choose_probe_records(data) if work.world.is_main else None
        index = work.world.comm.broadcast_object(chosen, "choosing records to probe")
        batch = move_to_device(data.fetch(index), work.world.device)
        check_records(batch, len(index))
        mode = choose_mode(args.grad_mode, work.module, trained, clipper, run, batch, len(index))
        telemetry = Telemetry(args, plan, clipper, one_by_one=mode.one_by_one)
        with installed_attributes(owners_of(work.module)):
            telemetry.try_out(mode, run, batch, len(index))
        mixed = mixed_records(data, index)
        return mode, [*([mixed] if mixed else []), *neighbour_problems(mode, run, data, index)]
    except ConfigurationError as error:
        raise _refusal(str(error)) from error
    finally:
        for part, training in was_training.items():
            part.training = training


def _clipper(args: DifferentialPrivacyArguments, names: list[str]) -> Clipper:
    norm = args.per_sample_max_grad_norm
    if args.clipping == "per_layer":
        return per_layer_clipper(names, norm)
    assert isinstance(norm, int | float)
    kinds = {"flat": FlatClipper, "automatic": AutomaticClipper, "adaptive": AdaptiveClipper}
    return kinds[args.clipping](float(norm))


def _randomness(args: DifferentialPrivacyArguments, comm: Communicator) -> Randomness:
    if args.debug_seed is not None:
        return DebugRandomness(args.debug_seed)
    if args.secure:
        return SystemRandomness()
    return SeededRandomness(_shared_key(args, comm, "seeding private noise"))


def _shared_key(args: DifferentialPrivacyArguments, comm: Communicator, what: str) -> int:
    """A secret of 128 bits, the same on all processes; the seed in a run with one."""
    return args.debug_seed if args.debug_seed is not None else int(comm.broadcast_object(secrets.randbits(128), what))


def _agree_on(comm: Communicator, work: Workload, plan: PrivacyPlan, args: DifferentialPrivacyArguments) -> None:
    """One mechanism on all processes, or none."""
    shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in work.module.named_parameters()]
    facts = {"model": shapes, "plan": plan, "data set": work.data and work.data.length, "arguments": args}
    digests = {what: hashlib.sha256(repr(fact).encode()).hexdigest() for what, fact in facts.items()}
    marks = comm.gather(digests, "preparing private training")
    for what in facts:
        if len({mark[what] for mark in marks}) > 1:
            raise PrivacyError(
                f"the {what} is not the same on all processes, so they would not carry out one mechanism. Build "
                "everything alike on every process."
            )


def _refusal(*reasons: str) -> PrivacyError:
    head = "private training is refused, because its guarantee would not hold:"
    return PrivacyError("\n".join([head, *(f"- {reason}" for reason in reasons)]))
