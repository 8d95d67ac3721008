"""How trials side by side share GPUs and CPU threads."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from littrainer.search.failures import SearchMistake
from littrainer.search.side_by_side.device_shares import number_of_jobs, share_of, threads_of_each

ON_CPU = SimpleNamespace(device=torch.device("cpu"))
ON_GPU = SimpleNamespace(device=torch.device("cuda", 0))


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize("number", [0, -2, 1.5, "2", True, None])
def test_what_is_no_number_of_trials_is_refused(number: Any) -> None:
    with pytest.raises(SearchMistake, match=f"n_jobs={number!r} has to be the number of trials side by side"):
        number_of_jobs(ON_CPU, number)


def test_minus_one_is_one_for_each_gpu_and_without_gpus_for_each_core(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    assert [number_of_jobs(ON_GPU, -1), number_of_jobs(ON_CPU, -1), number_of_jobs(ON_GPU, 7)] == [4, 3, 7]


def test_gpus_go_round(four_gpus: None) -> None:
    shares = [share_of(ON_GPU, job, 6)["CUDA_VISIBLE_DEVICES"] for job in range(6)]
    assert shares == ["0", "1", "2", "3", "0", "1"]


def test_gpus_that_the_search_sees_are_the_ones_that_are_shared(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8a3f,7,2")
    assert [share_of(ON_GPU, job, 4)["CUDA_VISIBLE_DEVICES"] for job in range(4)] == ["5", "GPU-8a3f", "7", "2"]


def test_on_cpus_no_gpu_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in share_of(ON_CPU, 0, 2)


def test_cpu_threads_are_shared_out_and_none_is_left_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert [threads_of_each(jobs) for jobs in (2, 4, 8)] == [3, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    share = share_of(ON_CPU, 0, 2)
    # The number that was asked for is that of all; what other libraries were told stays.
    assert [share[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")] == ["3", "3", "5"]


def test_a_process_of_a_trial_belongs_to_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OF_THE_SCRIPT", "kept")
    share = share_of(ON_CPU, 0, 2)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(share)
    assert share["OF_THE_SCRIPT"] == "kept"
