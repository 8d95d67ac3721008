from __future__ import annotations

from typing import Any

import pytest

from littrainer.data import stream_end as ends
from littrainer.data.stream_end import UnequalData
from littrainer.plain_lightning.evaluations import Evaluations
from tests.plain_lightning.fitting import loader, module_of, trainer_for


@pytest.fixture
def a_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has a batch less of everything."""
    monkeypatch.setattr(ends, "are_several", lambda: True)
    monkeypatch.setattr(ends, "from_each", lambda own: [own, (own[0] - 1 if own[0] else None, *own[1:])])


@pytest.mark.usefixtures("a_second_process")
@pytest.mark.parametrize(("evaluate", "what"), [("validate", "validation"), ("test", "test")])
def test_unequal_loaders_of_several_processes_are_refused_before_they_wait_for_ever(evaluate: str, what: str) -> None:
    with pytest.raises(UnequalData, match=f"data of a {what} does not give.*rank 0 has 3 batches, rank 1 has 2"):
        getattr(trainer_for(), evaluate)(module_of(), loader(), verbose=False)


@pytest.mark.usefixtures("a_second_process")
def test_batches_that_are_left_out_or_cannot_be_counted_are_not_compared() -> None:
    stream = (batch for batch in list(loader()))
    assert "val_loss" in trainer_for().validate(module_of(), stream, verbose=False)[0]
    with pytest.raises(UnequalData, match="rank 0 has 2 batches, rank 1 has 1 batch"):
        trainer_for(limit_val_batches=2).validate(module_of(), loader(), verbose=False)


def test_a_copy_does_not_go_on_with_the_evaluation_at_hand() -> None:
    evaluations = Evaluations(None)
    evaluations._waiting["val_loss"] = 1.0
    state: Any = evaluations.__getstate__()
    assert state["_waiting"] == {} and state["_round"] is None
