"""Settings of the whole suite."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, settings

from ds_trainer.config.environment import Environment
from tests.cluster.machines import Cluster, why_not
from tests.support.chromium import browser
from tests.support.operators import OPERATORS, OperatorBuild
from tests.support.pool import close_pools

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_TRAINER_SELF_TEST", "never")  # asked for where it is tested

# Else the package gives its logger a handler of its own where it is imported before pytest has set its handlers: then
# the records that a test gets would depend on which folders' conftest.py pytest was given.
logging.getLogger("ds_trainer").addHandler(logging.NullHandler())

# Deadlines measure the machine, not the code.
settings.register_profile("ds_trainer", deadline=None, max_examples=60)
# For tools/mutants.py: the same examples at every run, and the first that fails is enough.
_PHASES = (Phase.explicit, Phase.generate)
settings.register_profile("mutants", deadline=None, max_examples=60, derandomize=True, database=None, phases=_PHASES)
settings.load_profile(os.environ.get("DS_TRAINER_TEST_PROFILE", "ds_trainer"))


def pytest_configure(config: pytest.Config) -> None:
    """Operators that ranks and scripts compile for themselves are kept: each of them takes minutes."""
    if hasattr(config, "cache") and "TORCH_EXTENSIONS_DIR" not in os.environ:
        folder = config.cache.mkdir("torch_extensions_of_ranks")  # type: ignore[union-attr]
        for lock in folder.rglob("lock"):  # of a build that was killed; every later one would wait for it
            lock.unlink()
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


_FOUND: dict[str, Callable[[], Any]] = {"libaio.h": Environment().has_async_io, "chromium": browser}
"""How to look for what is not simply a program on PATH."""


_JOBS = (
    "tests/cluster/",
    "tests/resilience/",
    "tests/examples/",
    "tests/benchmarks/",
    "tests/engine/test_launchers.py",
)
"""Several processes begin with what takes long, so that none is left alone with one at the end."""


def _ask_for_more(item: pytest.Item) -> None:
    """Tests of the default run need Python, git and a C compiler alone."""
    for marker in item.iter_markers("needs"):
        item.add_marker("extended")
        missing = [what for what in marker.args if not _FOUND.get(what, partial(shutil.which, what))()]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"this machine has no {', '.join(missing)}"))


def _leave_out(function: str, cases: list[pytest.Item], is_whole: bool) -> None:
    """Apply ``@pytest.mark.cases`` of a function: what it does not choose runs only when asked for.

    Args:
        function: its name, for the message.
        cases: its cases, in the order of their collection.
        is_whole: whether these are all cases.

    Raises:
        pytest.UsageError: the marker names a case that the function does not have.
    """
    marker = cases[0].get_closest_marker("cases")
    if marker is None:
        return
    names = [item.nodeid.partition("[")[2].removesuffix("]") for item in cases]
    named = {value for value in marker.args if isinstance(value, str)}
    if is_whole and not named <= set(names):
        raise pytest.UsageError(
            f"{function}: its marker names the case {sorted(named - set(names))[0]!r}; it has none."
        )
    chosen = next((value for value in marker.args if isinstance(value, int)), 0)
    for number, (name, item) in enumerate(zip(names, cases, strict=True)):
        if number * chosen % len(cases) >= chosen and name not in named:
            item.add_marker(marker.kwargs.get("rest", "matrix"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is run only when asked for is marked and left out; for ``pytest -n``, files that start jobs come first."""
    is_whole = not any("::" in argument for argument in config.args) and not getattr(config.option, "lf", False)
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        _ask_for_more(item)
        if item.nodeid.startswith("tests/clients/"):
            item.add_marker("clients")
        if "extensions" in getattr(item, "fixturenames", ()):  # compiled operators: building them takes minutes
            item.add_marker("extended")
    for function, cases in functions.items():
        _leave_out(function, cases, is_whole)
    kinds = ("matrix", "clients", "extended")  # the first that a test has is the one to ask for
    asked = {item: next((kind for kind in kinds if item.get_closest_marker(kind)), "") for item in items}
    left_out = [item for item in items if asked[item] not in config.option.markexpr]
    items[:] = [item for item in items if asked[item] in config.option.markexpr]
    config.hook.pytest_deselected(items=left_out)
    if "PYTEST_XDIST_WORKER" in os.environ:
        built = {item.path for item in items if "extensions" in getattr(item, "fixturenames", ())}
        items.sort(key=lambda item: (not item.nodeid.startswith(_JOBS), item.path in built))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file runs in one process, whose tests share fixtures; so do all files that use the cluster."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "tests/cluster" if path.startswith("tests/cluster/") else path

    return ByFile(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin at once what a test will have to wait for, and spare it collections of all that was imported."""
    gc.freeze()
    waiting = any("extensions" in getattr(item, "fixturenames", ()) for item in session.items)
    if waiting and not session.config.option.collectonly:
        folder = session.config.cache.mkdir("torch_extensions")  # type: ignore[union-attr]
        names = ["FusedAdamBuilder", *(["AsyncIOBuilder"] if Environment().has_async_io() else [])]
        session.config.stash[OPERATORS] = OperatorBuild(folder, names)


def pytest_unconfigure(config: pytest.Config) -> None:
    """No compiler outlives the tests."""
    if OPERATORS in config.stash:
        config.stash[OPERATORS].end()


@pytest.fixture(scope="session")
def extensions(request: pytest.FixtureRequest) -> str:
    """A folder of our own with the operators of DeepSpeed that tests need, whose build began with the session."""
    return request.config.stash[OPERATORS].folder()


@pytest.fixture(scope="session", autouse=True)
def _close_worker_pools() -> Iterator[None]:
    """Ranks started for this session end with it."""
    yield
    close_pools()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SLURM cluster of two nodes inside this machine, with sshd on each; see ``tests/cluster/machines.py``."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no cluster inside this machine: {reason}")
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    yield running
    running.close()


# What a process group writes into the environment: a process that a later test starts must not take it for its own.
_OF_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "DS_TRAINER_LOCAL_RANK",
)


_AT_START = {name: os.environ.get(name) for name in _OF_LAUNCHERS}


def _as_at_start() -> None:
    for name, value in _AT_START.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _environment_of_this_process() -> Iterator[None]:
    """A training in the process of the tests, also one of a module's fixture, leaves no launcher's variables behind."""
    _as_at_start()
    yield
    _as_at_start()


@pytest.fixture(scope="module", autouse=True)
def _process_group_of_this_process() -> Iterator[None]:
    """A training in the process of the tests leaves no process group to the next file."""
    yield
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        from ds_trainer.engine.process_group import stop_process_group

        stop_process_group()


@pytest.fixture(autouse=True)
def _handlers_of_this_process() -> Iterator[None]:
    """A handler that a test adds gets no records of later tests."""
    logger = logging.getLogger("ds_trainer")
    before = list(logger.handlers)
    yield
    logger.handlers[:] = before
