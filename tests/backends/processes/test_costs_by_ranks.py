"""Messages and requests of a rank, and their growth with the number of ranks. No test here reads a clock."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from tests.helpers.processes import run_world
from tests.helpers.workers import scale
from tools.scale import message_costs
from tools.scale.counting_store import CountingStore
from tools.scale.store_costs import failure, in_threads, rendezvous
from trainstack import ranks
from trainstack._store import TimedStore
from trainstack.backends.processes import network
from trainstack.backends.processes.headers import SIZE
from trainstack.backends.processes.peer_report import MOST_LINES, Place, missing_peers, rank_list


@pytest.mark.distributed
@pytest.mark.processes
@pytest.mark.parametrize(
    "size", [2, 4, pytest.param(8, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_a_sum_sends_log2_messages_and_a_gather_one_collective(size: int) -> None:
    """P-K1, P-K8: earlier, a sum was an all-gather of 256 bytes of each rank; skewed gathers were broadcasts of all."""
    by_rank = run_world(size, scale.exchanges)

    most = message_costs.merge(size)
    for costs in by_rank:
        for name in ("sum", "text", "place", "errors"):
            assert costs[name]["send"] <= most.messages, name
            assert costs[name]["bytes"] <= most.bytes, name
            assert sum(costs[name].values()) == costs[name]["send"] + costs[name]["bytes"], f"{name}: no collective"
        assert costs["states"]["send"] <= 2 * most.messages
        assert (costs["gather"]["allgather"], costs["gather"]["broadcast"]) == (1, 0)
        assert (costs["outputs"]["allgather"], costs["outputs"]["broadcast"]) == (4, 0), (
            "one for each leaf, on any number of ranks"
        )
        assert costs["skewed"]["broadcast"] <= 1, "of the only rank with large data"
    assert max(costs["sum"]["send"] for costs in by_rank) == most.messages


@pytest.mark.distributed
@pytest.mark.processes
def test_outputs_go_to_the_main_process_or_stay_local() -> None:
    """P-K8. A rank sends each leaf once, in place of receiving those of all ranks."""
    main, *others = run_world(3, scale.kept_outputs, samples=7)

    assert main["True"]["same"]
    assert main["main"]["same"]
    assert [one["own"]["rows"] for one in (main, *others)] == [4, 2, 1]
    for one in others:
        assert one["True"]["same"]
        assert one["main"]["rows"] is None
        assert one["main"]["counts"]["broadcast"] == 0
        assert one["main"]["counts"]["allgather"] == one["own"]["counts"]["allgather"] + 1, "the shapes of the outputs"


@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_the_rendezvous_makes_a_bounded_number_of_store_requests(size: int) -> None:
    """P-K3: earlier, each rank made 250 requests in each second of waiting."""
    cost = rendezvous(size, spread_s=0.0)

    assert cost.requests <= 40 * size
    assert cost.bytes <= 4000 * size + 200 * size * size


@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_the_values_of_all_ranks_are_read_with_one_request(size: int) -> None:
    """P-K4: earlier, each rank read the value of each other rank, which is quadratic in the number of ranks."""
    store = CountingStore()
    this = threading.local()

    def say(rank: int) -> list[str]:
        this.rank = rank
        return ranks.exchange("host", f"node{rank}", timeout_s=30)

    with (
        mock.patch.object(ranks, "own_part", return_value=TimedStore(store, 30)),  # type: ignore[arg-type]
        mock.patch.object(dist, "get_rank", side_effect=lambda: this.rank),
        mock.patch.object(dist, "get_world_size", return_value=size),
    ):
        said = in_threads(size, say)

    assert said == [[f"node{rank}" for rank in range(size)]] * size
    assert store.requests <= 30 * size


@pytest.mark.parametrize("size", [4, 8, 32])
def test_only_a_few_ranks_ask_all_others_after_a_loss(size: int) -> None:
    """P-K5: earlier, each rank asked all others: 1,000 ranks made 3.2 million requests, each with a report of all."""
    cost = failure(size)

    assert cost.requests <= 200 * size
    assert cost.lines <= max(16 * 10, 2 * size + 20)


def test_a_report_of_a_thousand_places_has_few_lines() -> None:
    places = {rank: Place(host=f"h{rank}", when=0.0, text=f"step {rank}") for rank in range(1000)}

    said = missing_peers(0, "Timed out", places)

    assert len(said.splitlines()) < MOST_LINES + 5
    assert "and 960 more places" in said
    assert rank_list([0, 2, 3, 5, 6, 7, 8]) == "0, 2, 3, 5-8"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_lazy_groups_need_linear_and_meshes_quadratic_store_requests(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-K2."""
    monkeypatch.setenv(network.VARIABLE, "lo")
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)

    def requests() -> int:
        shared, number, lock = HashStore(), [0], threading.Lock()

        class Counting(Store):
            def set(self, key: str, value: Any) -> None:
                with lock:
                    number[0] += 1
                shared.set(key, value)

            def get(self, key: str) -> bytes:
                with lock:
                    number[0] += 1
                found: bytes = shared.get(key)
                return found

            def wait(self, keys: Any, *timeout: Any) -> None:
                shared.wait(keys, *timeout)

        def use(rank: int) -> Any:
            store = Counting()
            stores.append(store)  # a lazy group uses it later
            group = ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
            opened.wait()
            made.append(number[0])
            opened.wait()
            total = torch.ones(1)
            group.allreduce([total]).wait()
            assert total.item() == size
            return group

        opened, made, stores = threading.Barrier(size), list[int](), list[Store]()
        groups = in_threads(size, use)
        assert len(groups) == size
        return made[0]

    eager = requests()
    with mock.patch.object(network, "EAGER_RANKS", 1), network.connections_for(size):
        lazy = requests()
    assert lazy == size, "each rank writes its address, once"
    assert eager >= size * (size + 1), "each rank reads the address of each other rank"


def test_small_worlds_connect_eagerly_unless_the_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    assert [network.connects_lazily(size) for size in (2, 64, 65)] == [False, False, True]
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert network.connects_lazily(2)


def test_a_merge_costs_the_messages_of_its_busiest_rank() -> None:
    assert [message_costs.merge(size).messages for size in (2, 3, 4, 5, 8, 1000)] == [1, 2, 2, 3, 3, 10]
    assert message_costs.merge(8).bytes == 3 * SIZE
