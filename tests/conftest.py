"""Settings for every test: no network, one thread, and no progress bars of tokenizers across processes."""

from __future__ import annotations

import gc
import inspect
import logging
import multiprocessing
import os
import signal
import sys
import textwrap
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.left_out import LEFT_OUT, leave_out
from tests.scenarios.once_per_process import leave_out_of_collections, leave_writing_to_the_system

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Clients of experiment trackers report on their use otherwise.
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}

# Before torch, transformers or datasets is imported, since they read these when they are imported.
for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)

# A shell starts what runs in its background with Ctrl-C ignored; tests send it to themselves and to what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent

leave_writing_to_the_system()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out what tests/left_out.py lists, as `make test` does, and tell of it",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that is left out is not imported either."""
    is_quick = config.getoption("--quick") and collection_path.is_relative_to(TESTS)
    return True if is_quick and collection_path.relative_to(TESTS).as_posix() in LEFT_OUT else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        leave_out(config, items, lambda item: item.nodeid.partition("[")[0].removeprefix("tests/") in LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--quick"):
        terminalreporter.section("left out; `make test-all` runs everything")
        names = ", ".join(
            name.removesuffix(".py") for name in [*sorted(LEFT_OUT), "most scenarios of fidelity/test_fidelity"]
        )
        terminalreporter.write_line(textwrap.fill(names, 120, break_on_hyphens=False))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze objects imported and collected before the first test, which are no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        leave_out_of_collections()


# Variables that trainings leave: Lightning its seed, a test that plays another process its ranks.
LEFT_IN_THE_ENVIRONMENT = (
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_USE_CPU"),
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_CPU_RAM_EFFICIENT_LOADING"),
    "LITTRAINER_SWITCHED_FSDP_ON",
)


@pytest.fixture(autouse=True)
def environment_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without these variables, and what it sets ends with it."""
    for name in LEFT_IN_THE_ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def the_first_process_logs() -> None:
    """A test that plays another process leaves its rank with Lightning, whose loggers then write nothing."""
    rank_zero: Any = sys.modules.get("lightning_utilities.core.rank_zero")
    if rank_zero is not None:
        rank_zero.rank_zero_only.rank = 0


@pytest.fixture(autouse=True)
def loggers_tell_warnings() -> None:
    """A Trainer of an earlier test may have asked for another `log_level`, or may have been made under the redirection.

    Both hold for the whole process, as does what a script sets for Lightning.
    """
    for name in ("lightning", "lightning_fabric", "pytorch_lightning"):
        for each in (name, f"{name}.fabric", f"{name}.pytorch"):
            lightnings = logging.getLogger(each)
            if lightnings.level not in (logging.NOTSET, logging.INFO):
                lightnings.setLevel(logging.INFO)
    ours = logging.getLogger("littrainer")
    ours.setLevel(logging.WARNING)
    ours.propagate = True
    theirs = logging.getLogger("transformers")
    if theirs.level != logging.NOTSET:
        theirs.setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def loaders_are_those_of_torch() -> Iterator[None]:
    """While a hook makes a loader, Lightning wraps methods of every loader class, and an error there leaves them so."""
    yield
    if "torch.utils.data" not in sys.modules:
        return
    from torch.utils.data import BatchSampler, DataLoader

    if any(hasattr(each.__dict__.get("__setattr__"), "__wrapped__") for each in (DataLoader, BatchSampler)):
        for each in [*with_subclasses(DataLoader), *with_subclasses(BatchSampler)]:
            for name in ("__init__", "__setattr__", "__delattr__"):
                if name in vars(each):
                    setattr(each, name, inspect.unwrap(vars(each)[name]))
                if f"__old{name}" in vars(each):
                    delattr(each, f"__old{name}")


@pytest.fixture(autouse=True)
def no_workers_for_later_tests() -> Iterator[None]:
    """A loader with lasting workers that is collected in some later test would wait five seconds for each of them."""
    yield
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()


def with_subclasses(of: type) -> Iterator[type]:
    yield of
    for each in of.__subclasses__():
        yield from with_subclasses(each)
