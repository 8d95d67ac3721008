"""What printed programs are told to train: the same weights and rows each time."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios.data import vector_rows
from tests.scenarios.models import VectorClassifier


def seeded_classifier() -> VectorClassifier:
    torch.manual_seed(3)
    return VectorClassifier()


def twelve_rows() -> list[dict[str, Any]]:
    return vector_rows(12)
