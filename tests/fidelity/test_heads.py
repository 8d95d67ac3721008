"""Layouts of a batch with heads of transformers: `python -m tests.fidelity.heads` tries several hundred, here some."""

from __future__ import annotations

import pytest

from tests.fidelity.heads import SAMPLE, Outcome, heads, tried

TASKS = heads()
# Their rows lean on each other, by batch normalization, or have two denominators.
NOT_EXACT = {"SegformerForSemanticSegmentation", "BertForPreTraining"}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_head_is_exact_in_each_layout_and_warned_about_if_it_is_not_by_itself(name: str) -> None:
    results = tried(name, TASKS[name])
    assert isinstance(results, Outcome), results
    assert results.fault is None and results.is_exact is (name not in NOT_EXACT)


def test_the_sample_has_heads_of_both_kinds() -> None:
    assert len(SAMPLE) == 30 and len({TASKS[name] for name in SAMPLE}) == 11
