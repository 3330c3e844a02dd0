"""`JoinsProcesses`, the base of the layers that join the processes of a launcher."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from trainstack.backends.base import TrainerBackend
from trainstack.backends.decorator import AbstractTrainerBackendDecorator
from trainstack.backends.processes.communicator import GroupCommunicator
from trainstack.backends.processes.environment import (
    DistributedTrainingArguments,
    ProcessInfo,
    detect_process_info,
    is_on_one_host,
    launch_help,
    process_info_of_group,
)
from trainstack.backends.processes.gathering import gather_outputs
from trainstack.backends.processes.network import choose_interface, use_interface
from trainstack.backends.processes.opening import (
    RENDEZVOUS_S,
    Opening,
    bound_device,
    group_seconds,
    log_hosts,
    reachable_address,
)
from trainstack.backends.processes.world import DeviceChoice, World, pick_device
from trainstack.errors import ConfigurationError
from trainstack.ranks import own_part

if TYPE_CHECKING:
    from trainstack.backends.processes.rendezvous import Rendezvous


class JoinsProcesses(AbstractTrainerBackendDecorator):
    """Joins the processes that a launcher started, gathers their outputs, and leaves the process group at the end.

    An existing process group is adopted and never destroyed. The processes then communicate in separate new groups,
    which have `timeout_s`, and which may be aborted after a failure.

    Args:
        inner: the layer inside this one.
        place: an explicit rank, world size and so on; by default the launcher's environment gives them.
        gather_frequency: the largest number of rows that one exchange sends when outputs are gathered.
        timeout_s: seconds after which a collective fails that some process has not joined.
        allow_pickle: see `DistributedTrainingArguments.allow_pickle`.
        rendezvous_timeout_s: seconds in which all processes have to call `open`, and again to make their groups; by
            default 600, or `timeout_s` if that is shorter.
        run_id: a name that all processes of a run share; a process with another name is refused.
        environ: the environment with the launcher's variables.

    Raises:
        ConfigurationError: by `open`, if neither a process group, nor `place`, nor a launcher is found.
    """

    joins_processes: ClassVar[bool] = True
    configured_by: ClassVar[Mapping[type, str]] = {DistributedTrainingArguments: "place"}

    def __init__(
        self,
        inner: TrainerBackend,
        *,
        place: DistributedTrainingArguments | None = None,
        gather_frequency: int | None = None,
        timeout_s: float = 1800.0,
        allow_pickle: bool = False,
        rendezvous_timeout_s: float | None = None,
        run_id: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(inner)
        self._explicit, self._environ = place, os.environ if environ is None else environ
        self._gather_frequency = gather_frequency or (place.gather_frequency if place is not None else None)
        self._allow_pickle = allow_pickle if place is None else place.allow_pickle
        self._timeout_s = timeout_s if place is None else place.timeout_s
        clock = rendezvous_timeout_s if place is None else place.rendezvous_timeout_s
        self._rendezvous_s = min(RENDEZVOUS_S, self._timeout_s) if clock is None else clock
        self._run_id = run_id if place is None else place.run_id
        self._interface: str | None = None  # on which gloo was made to listen
        self._owns_group = False
        self._group: dist.ProcessGroup | None = None  # of the collectives of training
        self._made: list[dist.ProcessGroup] = []
        self._world: World | None = None

    def open(self, device: DeviceChoice = "auto") -> World:
        place = None if dist.is_initialized() else detect_process_info(self._environ, self._explicit)
        if place is None and not dist.is_initialized():
            raise ConfigurationError(launch_help(self.spec))
        found = None
        if place is None:
            opening = Opening(own_part("open"), dist.get_rank(), dist.get_world_size(), self._rendezvous_s)
        else:
            from trainstack.backends.processes.rendezvous import rendezvous

            found = rendezvous(place, self._rendezvous_s, self._environ, self._run_id)
            opening = Opening(found.words, place.rank, place.size, self._rendezvous_s)
        try:
            return self._open(opening, place, found, device)
        except BaseException as error:  # the other ranks wait for this one in C++, where no exception ends the wait
            opening.fail(error)
            self._take_interface_back()
            raise

    def _open(
        self, opening: Opening, place: ProcessInfo | None, found: Rendezvous | None, device: DeviceChoice
    ) -> World:
        here = place or process_info_of_group(self._rendezvous_s)
        # The layer inside selects the device. It may refuse it.
        inner = self.inner.open(pick_device(device, here.local_rank, here.local_size))
        if found is not None:
            self._choose_interface(found, here)

        def join() -> GroupCommunicator:
            if inner.device.type != "cpu":
                torch.accelerator.set_device_index(inner.device.index or 0)  # per thread; `opening.run` uses a new one
            if found is not None:
                self._join(here, found.store, inner.device)
            return self._communicator()

        comm = opening.run(join)
        if found is not None:
            atexit.unregister(_let_threads_finish)
            atexit.register(_let_threads_finish)
        self._world = replace(
            inner, rank=dist.get_rank(), size=dist.get_world_size(), local_rank=here.local_rank, comm=comm
        )
        return self._world

    def _choose_interface(self, found: Rendezvous, here: ProcessInfo) -> None:
        """Set the interface of gloo to an address that all ranks can reach, and to no other."""
        hosts = [member.host for member in found.members]
        if here.rank == 0:
            log_hosts(found.members)
        address = reachable_address(found.members, here.rank)
        one_host = len(set(hosts)) == 1 and is_on_one_host(here, self._environ)
        self._interface = choose_interface(hosts, one_host, address, os.environ)
        if self._interface is not None:
            use_interface(self._interface)

    def _communicator(self) -> GroupCommunicator:
        # With an adopted group, make separate ones: they have our timeout, and may be aborted when a process fails.
        # The communicator has its own group, so that its exchanges never meet the collectives of gradients.
        groups = self._make_groups()
        self._group = groups[0]
        talking = self._new_group("gloo")
        # torch 2.13.0: there is no public way to get the store of an adopted process group.
        store = dist.distributed_c10d._get_default_store()
        return GroupCommunicator(talking, store, groups, self._timeout_s, allow_pickle=self._allow_pickle)

    def _make_groups(self) -> list[dist.ProcessGroup]:
        """The groups for collectives of training that include this process; first the group of all processes."""
        return [cast(dist.ProcessGroup, dist.group.WORLD) if self._owns_group else self._new_group(None)]

    def _new_group(self, backend: str | None, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """A group of `ranks`, or of all. All processes call it together."""
        seconds = group_seconds(self._timeout_s, backend or dist.get_backend())
        made: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=seconds))
        if ranks is None or dist.get_rank() in ranks:
            self._made.append(made)
        return made

    def _collective_backend(self, device: torch.device) -> str:
        """The backend of training collectives on `device`, as an argument of `init_process_group`."""
        return (self._explicit and self._explicit.backend) or dist.get_default_backend_for_device(device.type)

    def _join(self, place: ProcessInfo, store: Store, device: torch.device) -> None:
        backend = self._collective_backend(device)
        dist.init_process_group(
            backend=backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=group_seconds(self._timeout_s, backend)),
            device_id=bound_device(device, backend),
        )
        self._owns_group = True

    def gather(self, outputs: Any) -> Any:
        assert self._world is not None
        return gather_outputs(self._world.comm, self.inner.gather(outputs), self._gather_frequency)

    def close(self) -> None:
        try:
            self.inner.close()
        finally:
            if dist.is_initialized():
                for group in self._made:
                    dist.destroy_process_group(group)
                if self._owns_group:
                    dist.destroy_process_group()
            self._group, self._made, self._owns_group = None, [], False
            self._take_interface_back()

    def _take_interface_back(self) -> None:
        if self._interface is not None:
            use_interface(None)
            self._interface = None


def _let_threads_finish() -> None:
    """Let gloo's threads release tensors before the interpreter exits.

    gloo's thread may hold the last reference to a reduced gradient. If it asks for the GIL while Python exits, the
    process is aborted. 0.05 s is ample for a thread that only has to take the lock once.
    """
    time.sleep(0.05)
