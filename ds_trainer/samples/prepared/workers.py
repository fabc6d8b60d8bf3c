"""Writes the shards of a dataset in several processes. Imports no torch, so that a worker starts quickly.

A shard is a fixed run of records, so the files do not depend on the number of processes. Source files up to the size of
a shard are read by the worker that encodes them; larger ones are read here, and their records are sent to the workers.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import NamedTuple

from ds_trainer.samples.prepared.shard import Encode, ReadRecords, ShardResult, write_shard
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.threads import new_thread

SHARD_BYTES = 16 * 2**20  # of source
_MOST_SHARDS = 4096
_POLL = 0.2


class Part(NamedTuple):
    """A part of the source that can be opened on its own, usually a file.

    Attributes:
        size: bytes, which decide the division into shards; about right is enough. None: unknown, treated as large.
        read: opens the records; it can be pickled (unless the part is larger than a shard), so it is a function at the
            top of a module, a ``functools.partial`` of one, or an object with ``__call__``.
    """

    size: int | None
    read: ReadRecords


class Task(NamedTuple):
    """The records of one shard, and their size in the source."""

    number: int
    reads: tuple[ReadRecords, ...]
    size: int


def tasks_of(parts: Sequence[Part], shard_bytes: int | None = None) -> Iterator[Task]:
    """The shards of ``parts``; nothing but their sizes and records decides them.

    Args:
        parts: in order.
        shard_bytes: bytes of source per shard; default: 16 MiB, or what gives 4,096 shards.
    """
    total = sum(part.size or 0 for part in parts)
    size = shard_bytes or max(SHARD_BYTES, total // _MOST_SHARDS)
    number, reads, collected = 0, list[ReadRecords](), 0
    for part in parts:
        small = part.size is not None and part.size <= size
        if reads and (not small or collected + (part.size or 0) > size):
            yield Task(number, tuple(reads), collected)
            number, reads, collected = number + 1, [], 0
        if small:
            reads.append(part.read)
            collected += part.size or 0
            continue
        for batch, batch_size in _batches(part.read, size):
            yield Task(number, (batch,), batch_size)
            number += 1
    if reads:
        yield Task(number, tuple(reads), collected)


def _batches(read: ReadRecords, size: int) -> Iterator[tuple[ReadRecords, int]]:
    pickled, collected = list[bytes](), 0
    for record in read():
        pickled.append(pickle.dumps(record, pickle.HIGHEST_PROTOCOL))
        collected += len(pickled[-1])
        if collected >= size:
            yield partial(map, pickle.loads, pickled), collected
            pickled, collected = [], 0
    if pickled:
        yield partial(map, pickle.loads, pickled), collected


def write_shards(
    directory: Path,
    tasks: Iterable[Task],
    encode: Encode,
    vocab_size: int | None,
    processes: int,
    report: Callable[[int, int], None] = lambda size, tokens: None,
) -> Generator[ShardResult, None, None]:
    """Write all shards; the results in order.

    Args:
        directory: an existing directory.
        tasks: read as far as there is work for the processes.
        encode: what :func:`~ds_trainer.samples.prepared.shard.write_shard` takes; it is pickled for several processes.
        vocab_size: all ids are below it.
        processes: 1: this one.
        report: called with further bytes of source and further tokens.

    Raises:
        ConfigError: ``encode`` cannot be pickled, a file cannot be written, or a worker was killed.
    """
    if processes == 1:
        for task in tasks:
            yield write_shard(directory, task.number, task.reads, encode, vocab_size, lambda tokens: report(0, tokens))
            report(task.size, 0)
        return
    try:
        pickled = pickle.dumps((encode, vocab_size, directory))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"encode cannot be sent to worker processes ({error}). Define it at the top of a module, or use 1 process."
        ) from error
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads or a GPU may hang
    tokens = context.Value("q", 0)
    seen = 0
    executor = ProcessPoolExecutor(processes, context, _start_worker, (pickled, tokens))
    waiting: dict[Future[ShardResult], Task] = {}
    done: dict[int, ShardResult] = {}
    upcoming, next_number = iter(tasks), 0
    try:
        while True:
            while len(waiting) < 2 * processes and (further := next(upcoming, None)) is not None:
                waiting[executor.submit(_write, further)] = further
            if not waiting:
                return
            for future in wait(waiting, _POLL, FIRST_COMPLETED).done:
                written = waiting.pop(future)
                done[written.number] = future.result()
                report(written.size, 0)
            counted = int(tokens.value)
            report(0, counted - seen)
            seen = counted
            while next_number in done:
                yield done.pop(next_number)
                next_number += 1
    except BrokenProcessPool as error:
        raise ConfigError(
            "A worker process that tokenizes was killed, most likely because memory ran out. Use fewer processes."
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_work: tuple[Encode, int | None, Path, Callable[[int], None]] | None = None


def _start_worker(pickled: bytes, tokens: Synchronized[int]) -> None:
    global _work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    os.environ["RAYON_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    new_thread(_end_with_parent, name="parent").start()

    def note(count: int) -> None:
        with tokens.get_lock():
            tokens.value += count

    _work = (*pickle.loads(pickled), note)


def _write(task: Task) -> ShardResult:
    assert _work is not None
    encode, vocab_size, directory, note = _work
    return write_shard(directory, task.number, task.reads, encode, vocab_size, note)


def _end_with_parent() -> None:
    """A killed parent cannot end its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
