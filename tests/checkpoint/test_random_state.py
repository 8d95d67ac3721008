from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from littrainer.checkpoint.random_state import capture_random_states, restore_random_states
from littrainer.errors.seeds import set_seed
from tests.scenarios.trainers import quiet_arguments


def draws() -> list[Any]:
    """The next numbers of each generator; a Gaussian one too, since NumPy keeps half of a pair of those."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.normal(),
        torch.rand(1).item(),
        torch.randn(1).item(),
    ]


def test_capturing_draws_nothing() -> None:
    set_seed(3)
    expected = draws()
    set_seed(3)
    capture_random_states()
    assert draws() == expected


def test_the_file_that_transformers_writes_is_read_and_has_the_same_entries(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    set_seed(5)
    owner: Any = type("Owner", (), {"args": quiet_arguments(tmp_path, TrainingArguments)})()
    Trainer._save_rng_state(owner, str(tmp_path))
    expected = draws()
    set_seed(99)
    restore_random_states(tmp_path / "rng_state.pth")
    assert draws() == expected
    theirs = torch.load(tmp_path / "rng_state.pth", weights_only=False)
    assert set(capture_random_states()) == set(theirs)
