from __future__ import annotations

import copy
import random
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from littrainer.data.fingerprint import MOST_ITEMS, fingerprint_dataset, fingerprint_model, fingerprints
from tests.scenarios.data import vector_rows
from tests.scenarios.models import VectorClassifier


class Rows(Dataset[Any]):
    """Draws a random number for each row, as an augmentation does, and counts its calls."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.generator = rows, np.random.RandomState(0)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a row was asked for")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("a row was asked for")


class LastFirst(list):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a method of a subclass was called")


def arrow(rows: list[Any]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def texts(count: int = 20) -> list[dict[str, Any]]:
    return [{"text": f"row {number}", "ids": [number, 2]} for number in range(count)]


MAKERS: dict[str, Any] = {
    "list": lambda rows: rows,
    "subclass of list": LastFirst,
    "class": Rows,
    "subset": lambda rows: Subset(Rows(rows), [1, 2]),
    "arrow": arrow,
    "arrow, shuffled": lambda rows: arrow(rows).shuffle(seed=0),
    "columns": lambda rows: UserDict(ids=np.array([row["ids"] for row in rows]), text=[row["text"] for row in rows]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_same_rows_have_one_fingerprint_and_a_changed_row_another(make: Any) -> None:
    changed = texts()
    changed[7]["ids"] = [7, 3]
    first = fingerprint_dataset(make(texts()))
    assert first == fingerprint_dataset(make(texts())) and first["rows"] == len(make(texts()))
    assert first["fingerprint"] != fingerprint_dataset(make(changed))["fingerprint"]
    assert first["fingerprint"] != fingerprint_dataset(make(texts(21)))["fingerprint"]


def test_no_random_number_is_drawn_and_no_transform_runs() -> None:
    dataset = arrow(texts())
    dataset.set_transform(lambda rows: pytest.fail("a transform ran"))
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    fingerprint_dataset(dataset)
    fingerprint_dataset(Rows(vector_rows(10)))
    assert before[:2] == (random.getstate(), np.random.get_state()[2])
    assert torch.equal(before[2], torch.get_rng_state())


def test_a_time_or_a_temporary_folder_is_no_data_and_is_told_apart_from_it() -> None:
    found = []
    for folder in ("/tmp/a", "/tmp/b"):
        dataset = Subset(Rows(texts()), [1, 2])
        dataset.dataset.cache = folder  # type: ignore[attr-defined]
        found.append(fingerprint_dataset(dataset))
    assert found[0]["fingerprint"] == found[1]["fingerprint"] and found[0]["attributes"] != found[1]["attributes"]


def test_a_stream_is_not_read() -> None:
    assert fingerprint_dataset(Stream()) == {"class": "Stream", "rows": None, "fingerprint": None, "attributes": None}


def test_tensors_of_any_kind_count_and_those_without_numbers_do_not_fail() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    found = {fingerprints(TensorDataset(torch.ones(3, 2).to(kind))) for kind in kinds}
    assert len(found) == len(kinds)
    assert fingerprints(torch.zeros(3).expand(4, 3)) == fingerprints(torch.zeros(4, 3))
    for without in (torch.empty(3, device="meta"), torch.eye(3).to_sparse(), torch.empty(0), np.array([{}, None])):
        assert len(fingerprints(without)[0]) == 12


def test_much_data_and_data_that_holds_itself_is_read_in_part_and_up_to_its_end() -> None:
    loop: dict[str, Any] = {"rows": [1]}
    loop["itself"] = loop
    assert len(fingerprints(loop)[0]) == 12
    rows = [{"text": "x" * 4000, "ids": [*range(500)], "image": torch.zeros(100_000)}] * (MOST_ITEMS - 1)
    found = {fingerprints([*rows, {**rows[0], **last}]) for last in ({}, {"text": "y"}, {"ids": []})}
    assert len(found) == 3 and fingerprints(rows * 2) == fingerprints([*rows, *rows])


def test_a_model_is_known_by_its_weights() -> None:
    one = VectorClassifier()
    two = copy.deepcopy(one)
    assert fingerprint_model(one) == fingerprint_model(two)
    assert fingerprint_model(one)["class"] == "VectorClassifier"
    assert fingerprint_model(one)["parameters"] == sum(parameter.numel() for parameter in one.parameters())
    with torch.no_grad():
        two.head.bias[1] += 1e-3
    assert fingerprint_model(one)["fingerprint"] != fingerprint_model(two)["fingerprint"]


def test_each_of_many_parameters_counts_and_those_without_numbers_do_not_fail() -> None:
    layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(MOST_ITEMS // 2 + 1)]
    before = fingerprint_model(torch.nn.ModuleList(layers))
    with torch.no_grad():
        layers[-1].weight += 1
    assert before["fingerprint"] != fingerprint_model(torch.nn.ModuleList(layers))["fingerprint"]
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    assert fingerprint_model(lazy)["parameters"] == 8
