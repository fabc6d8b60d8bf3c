"""A persistent pool of ranks: importing torch and deepspeed costs seconds, so it is done once for many cases.

``pool(world_size).run(function, *args)`` calls a module-level function on every rank of a real process group (gloo)
and returns the results in rank order. Ranks are forked from a server that has imported everything already. A case that
raises fails the test with the traceback of every rank that raised; a case that hangs or dies takes the pool with it,
and the next case gets a new one.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ds_trainer.utils.ranks import free_port

_PRELOADED = [
    "torch",
    "deepspeed",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "ds_trainer.training.trainer",
    # What the package imports when it makes an engine, trains and saves.
    "ds_trainer.checkpoint.manager",
    "ds_trainer.engine.self_test",
    "ds_trainer.engine.training_engine",
    "ds_trainer.training.planning.run_estimator",
    "ds_trainer.training.run_setup",
    "ds_trainer.training.train_loop",
    # What DeepSpeed imports when the first engine is made: Muon compiles functions, for which torch imports Inductor.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
]
_pools: dict[int, WorkerPool] = {}


class RankFailure(AssertionError):
    """A case failed on one or more ranks; the message holds their tracebacks."""


def pool(world_size: int) -> WorkerPool:
    """The pool of this size; started at first use."""
    if world_size not in _pools or not _pools[world_size].alive:
        _pools[world_size] = WorkerPool(world_size)
    return _pools[world_size]


def close_pools() -> None:
    """End all workers."""
    while _pools:
        _pools.popitem()[1].close()


class WorkerPool:
    """``world_size`` processes that form one process group and wait for work."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context(os.environ.get("DS_TRAINER_TEST_START", "forkserver"))
        multiprocessing.set_forkserver_preload(_PRELOADED)
        self.world_size = world_size
        port = free_port()
        self._pipes: list[Connection] = []
        self._workers = []
        for rank in range(world_size):
            parent_end, child_end = context.Pipe()
            worker = context.Process(target=_serve, args=(child_end, rank, world_size, port), daemon=True)
            worker.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._workers.append(worker)

    @property
    def alive(self) -> bool:
        """Whether all ranks are still there."""
        return bool(self._workers) and all(worker.is_alive() for worker in self._workers)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
        """``function(*args)`` on every rank; results in rank order.

        Raises:
            RankFailure: a rank raised, died, or did not answer within ``timeout`` seconds.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {timeout:.0f} s")
                good, value = pipe.recv()
            except (TimeoutError, EOFError, OSError) as error:
                failures.append(f"rank {rank}: {type(error).__name__} {error}")
                continue
            if good:
                results.append(value)
            else:
                failures.append(f"rank {rank}:\n{value}")
                deadline = min(deadline, time.monotonic() + 10.0)  # the others may wait for this rank in a collective
        if failures:
            self.close()
            raise RankFailure("\n".join(failures))
        return results

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join(timeout=2.0)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self._workers = []


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import gc

    import torch

    from ds_trainer.engine.process_group import start_process_group, stop_process_group

    torch.set_num_threads(1)
    start_process_group("cpu")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        os.environ.pop("LOCAL_WORLD_SIZE", None)  # accelerate, in transformers' Trainer, sets it to 1
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        gc.collect()
        gc.freeze()  # what is left are modules and caches: a million objects, which no later collection need look at
        pipe.send(answer)
    stop_process_group()
