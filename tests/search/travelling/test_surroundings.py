"""What a trial's process takes over from the script's."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from littrainer.search.travelling.surroundings import enter, set_log_levels, surroundings


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what these tests change of the process."""
    path, argv, threads = list(sys.path), list(sys.argv), torch.get_num_threads()
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    settings = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    sys.path[:], sys.argv[:] = path, argv
    _set(*settings, False, threads)


def _set(dtype: torch.dtype, precision: str, benchmark: bool, deterministic: bool, threads: int) -> None:
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(deterministic, warn_only=deterministic)
    torch.set_num_threads(threads)


def test_settings_of_torch_are_those_of_the_script(tmp_path: Path) -> None:
    _set(torch.float64, "medium", True, True, 1)
    found = surroundings()
    _set(torch.float32, "highest", False, False, 1)
    enter(found, threads=2)
    assert torch.get_default_dtype() is torch.float64
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cudnn.benchmark
    assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.get_num_threads() == 2


def test_modules_files_and_arguments_are_found_as_in_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Any = ModuleType("__main__")
    script.__file__ = "/its/folder/script.py"
    monkeypatch.setitem(sys.modules, "__main__", script)
    found = surroundings()
    found.update(path=["/its/folder"], argv=["script.py", "--fast"], folder=str(tmp_path))
    before = list(sys.path)
    enter(found, threads=1)
    seen = list(sys.path), list(sys.argv), os.getcwd()
    sys.path[:] = before
    assert seen == (["/its/folder"], ["script.py", "--fast"], str(tmp_path))
    main = sys.modules["__main__"]
    assert main is not script
    assert (main.__file__, main.__spec__) == ("/its/folder/script.py", None)


def test_log_levels_are_those_of_the_script() -> None:
    one = logging.getLogger("tests.search.one")
    one.setLevel(logging.ERROR)
    found = surroundings()
    one.setLevel(logging.DEBUG)
    set_log_levels(found)
    assert one.level == logging.ERROR
    one.setLevel(logging.NOTSET)
