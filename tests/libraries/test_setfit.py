"""An unchanged script of setfit, in several set-ups, equal to its run on transformers' Trainer."""

import pytest

from tests.libraries.sides import Both, described, needs_libraries

pytestmark = needs_libraries
SCRIPT = "setfit_training.py"
SET_UPS = ["distilled", "head_of_torch", "pairs", "triplets"]


@pytest.mark.parametrize("set_up", SET_UPS)
def test_body_head_and_model_card_are_those_of_transformers_trainer(both: Both, set_up: str) -> None:
    left = {path.rpartition("/")[2] for path in both.theirs.values if path.startswith(f"{set_up}/")}
    assert left >= {"model.safetensors", "setfit_results.json", "trainer_state.json"}
    assert [line for line in described(both) if line.startswith(f"{set_up}/")] == []
