"""Votes over the store have the same cost per rank in every world, and replace gloo if ranks cannot connect."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_trainer import ConfigError, TrainerCallback
from ds_trainer.training import run_setup as stopping
from ds_trainer.training.stopping.stop_controller import StopRequest, StopVote, TrainingStopped
from ds_trainer.utils import distributed
from ds_trainer.utils.exit_codes import REQUEUE
from ds_trainer.utils.host_votes import GroupVotes, StoreVotes, reachable_group
from ds_trainer.utils.ranks import free_port
from tests.support.pool import pool
from tests.support.resuming import make

TURNS = 5


class Counting:
    """A store client that counts its operations; ``check`` separately, which is polled."""

    def __init__(self, port: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        self.calls = self.looks = 0

    def __getattr__(self, name: str) -> Any:
        if name == "check":
            self.looks += 1
        else:
            self.calls += 1
        return getattr(self.store, name)


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_a_vote_is_the_maximum_and_costs_the_same_in_every_world(ranks: int) -> None:
    port, chance = free_port(), random.Random(0)
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    clients = [Counting(port) for _ in range(ranks)]
    ballots = [[[chance.randrange(100) for _ in range(4)] for _ in range(ranks)] for _ in range(TURNS)]

    def rank(number: int) -> list[list[int]]:
        votes, found = StoreVotes(clients[number], ranks, "x"), []
        for turn in range(TURNS):
            result = votes.begin(ballots[turn][number])
            time.sleep(0.01 * (number % 3))
            found.append(result())
        return found

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(rank, range(ranks)))
    wanted = [[max(column) for column in zip(*turn, strict=True)] for turn in ballots]
    assert found == [wanted] * ranks
    calls = [client.calls for client in clients]
    # Three each a turn, and five more for the last one of a turn, who reads, answers and clears up.
    assert min(calls) >= 3 * TURNS
    assert sum(calls) == 3 * TURNS * ranks + 5 * TURNS
    assert server.num_keys() <= 6, "what everybody has read is removed"


def both_kinds(steps: int) -> tuple[list[Any], list[Any]]:
    """The results of two stop votes, step by step; rank 1 requests a stop at step 3."""
    agreed: tuple[list[Any], list[Any]] = [], []
    for found, votes in zip(agreed, (GroupVotes(dist.group.WORLD), StoreVotes()), strict=True):  # type: ignore[arg-type]
        ballot = StopVote(votes)
        for step in range(steps):
            stop_request = StopRequest(REQUEUE, "SIGTERM", 1) if distributed.rank() == 1 and step >= 3 else None
            request = ballot.at(step, stop_request, lambda: 1.0)
            found.append(None if request is None else request.text)
        ballot.finish()
    return agreed


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stop_vote_is_the_same_over_gloo_and_the_store(ranks: int) -> None:
    results = pool(ranks).run(both_kinds, 8)
    for group, store in results:
        assert group == store == results[0][0]
        assert group[:4] == [None] * 4 and "SIGTERM on rank 1" in group


# -- ranks that come late (before the tests that follow, which leave groups of one rank behind) ------------------------


def group_of_late_ranks(seconds: float) -> tuple[bool, list[str]]:
    """Whether a group beside NCCL's results if rank 1 comes late, and what is logged."""
    from ds_trainer.parallel.groups import forget_groups, parallel_groups
    from ds_trainer.parallel.layout import ParallelLayout
    from ds_trainer.utils import host_votes

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    backend, limits = dist.get_backend, (host_votes.CONNECT_SECONDS, distributed.REPORT_SECONDS)
    real, distributed.collective_device = distributed.collective_device, lambda: torch.device("cpu")
    forget_groups()
    dist.get_backend = lambda group=None: "nccl" if group is None else backend(group)
    host_votes.CONNECT_SECONDS, distributed.REPORT_SECONDS = 2.0, 1.0
    logging.getLogger("ds_trainer").addHandler(handler)
    try:
        if dist.get_rank() == 1:
            time.sleep(seconds)
        return parallel_groups(ParallelLayout(2)).world_host is not None, messages
    finally:
        logging.getLogger("ds_trainer").removeHandler(handler)
        dist.get_backend, distributed.collective_device = backend, real
        host_votes.CONNECT_SECONDS, distributed.REPORT_SECONDS = limits
        forget_groups()


def test_a_rank_that_comes_late_is_waited_for_and_named() -> None:
    """It came later than ranks may take to connect, and not because gloo could not reach it."""
    (first, said), (second, silent) = pool(2).run(group_of_late_ranks, 4.0)
    assert first and second and silent == []
    assert said[0].startswith("Rank 0 has waited 1 s for 1 of 2 ranks: 1")
    assert "the last one was rank 1 on" in said[-1] and "late" in said[-1]
    assert not any("gloo" in text for text in said)


def test_ranks_that_are_a_little_apart_are_not_mentioned() -> None:
    assert pool(2).run(group_of_late_ranks, 0.2) == [(True, [])] * 2


def missing_rank() -> str:
    """What rank 0 says of rank 1, which does not come."""
    distributed.barrier()
    if dist.get_rank() == 1:
        distributed._turn()  # the tests that follow use the same processes
        return ""
    with pytest.raises(TimeoutError) as found:
        distributed.await_ranks(timedelta(seconds=0.5))
    return str(found.value)


def test_a_rank_that_never_comes_is_named_when_the_time_is_over() -> None:
    said, _ = pool(2).run(missing_rank)
    assert "Rank 0 has waited" in said and "for 1 of 2 ranks: 1" in said and "ddp_timeout" in said


# -- where gloo cannot connect -----------------------------------------------------------------------------------------


def connected(how: str) -> tuple[str, float, list[str]]:
    """The kind of group that results if ranks can or cannot connect, the seconds it took, and the log messages."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ds_trainer.utils.host_votes")
    logger.addHandler(handler)

    def make_group(limit: timedelta) -> Any:
        if how == "no interface" and dist.get_rank() == 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
        try:
            return dist.new_group(backend="gloo", timeout=limit)
        finally:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)

    real = dist.isend
    if how == "silence" and dist.get_rank() == 1:  # as if its packets were lost

        class Lost:
            def wait(self, limit: timedelta) -> None:
                pass

        dist.isend = lambda *arguments, **named: Lost()
    started = time.monotonic()
    try:
        group = reachable_group(make_group, seconds=3.0)
    finally:
        dist.isend = real
        logger.removeHandler(handler)
    seconds = time.monotonic() - started
    if group is None:
        return "store", seconds, messages
    votes = torch.tensor([dist.get_rank()])
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    return f"gloo {votes.item()}", seconds, messages


def test_ranks_that_can_connect_use_gloo() -> None:
    found = pool(2).run(connected, "well")
    assert [kind for kind, *_ in found] == ["gloo 1"] * 2
    assert [message for *_, message in found] == [[], []]


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["no interface", "silence"])
def test_ranks_that_cannot_connect_use_the_store_and_warn_once(how: str) -> None:
    found = pool(2).run(connected, how)
    assert [kind for kind, *_ in found] == ["store"] * 2, "all ranks alike, also where only one has failed"
    assert max(seconds for _, seconds, _ in found) < 30
    first, second = ([text for text in message if "cannot reach" in text] for *_, message in found)
    assert len(first) == 1 and second == []
    assert "GLOO_SOCKET_IFNAME" in first[0]


def groups_beside_nccl(tp: int) -> str:
    """The groups of a layout whose default group claims to be NCCL's and where gloo finds no network."""
    from ds_trainer.parallel.groups import forget_groups, parallel_groups
    from ds_trainer.parallel.layout import ParallelLayout
    from ds_trainer.utils import host_votes

    backend, new_group, seconds = dist.get_backend, dist.new_group, host_votes.CONNECT_SECONDS

    def cut_off(*arguments: Any, **named: Any) -> Any:
        if "gloo" in (*arguments, *named.values()):
            os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
        try:
            return new_group(*arguments, **named)
        finally:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)

    dist.get_backend, dist.new_group = lambda *arguments: "nccl", cut_off
    host_votes.CONNECT_SECONDS = 3.0
    real, distributed.collective_device = distributed.collective_device, lambda: torch.device("cpu")
    forget_groups()
    try:
        return "no group" if parallel_groups(ParallelLayout(2, tp=tp)).world_host is None else "a group"
    except ConfigError as error:
        return str(error)
    finally:
        dist.get_backend, dist.new_group, host_votes.CONNECT_SECONDS = backend, new_group, seconds
        distributed.collective_device = real
        forget_groups()


def test_a_layout_needs_gloo_only_for_batches() -> None:
    assert pool(2).run(groups_beside_nccl, 1) == ["no group"] * 2
    first, second = pool(2).run(groups_beside_nccl, 2)
    assert first == second
    assert "GLOO_SOCKET_IFNAME" in first and "exchange batches over gloo" in first


class Asks(TrainerCallback):
    """Sends the stop signal of a scheduler to rank 1 after step 2."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)


def stopped(output_dir: str) -> tuple[int, str, str]:
    used: list[str] = []
    real = stopping.host_votes
    stopping.host_votes = lambda group: used.append("store") or StoreVotes()  # type: ignore[func-returns-value]
    trainer = make(output_dir, max_steps=400, zero_stage=1)
    trainer.add_callback(Asks())
    try:
        trainer.train()
    except TrainingStopped as stop:
        return stop.step, stop.reason, used[0]
    finally:
        stopping.host_votes = real
    raise AssertionError("not stopped")


def test_a_training_stops_with_votes_over_the_store(tmp_path: Path) -> None:
    first, second = pool(2).run(stopped, str(tmp_path))
    assert first == second
    assert 2 < first[0] < 100 and first[1:] == ("SIGUSR1 on rank 1", "store")
