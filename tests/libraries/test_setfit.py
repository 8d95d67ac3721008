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


def test_callbacks_get_setfits_arguments_and_models_beside_those_of_the_inner_trainer(both: Both) -> None:
    notes = both.ours.values["pairs/setfit_results.json"]
    assert notes["notes / 0 / 0"] == "init_end"
    assert [notes["notes / 0 / 1"], notes["notes / 0 / 2"]] == [
        "TrainingArguments",
        "SentenceTransformerTrainingArguments",
    ]
    assert notes["notes / 0 / 4 / model"] == "SetFitModel"


def test_arguments_that_are_written_after_the_inner_trainer_is_made_are_those_it_trains_by(both: Both) -> None:
    results = both.ours.values["pairs/setfit_results.json"]
    assert results["arguments / learning_rate"] == "0.001"
    assert results["arguments / warmup_steps"] == "0.3"
    steps = {entry for name, entry in both.ours.values["pairs/trainer_state.json"].items() if name.endswith("/ step")}
    assert {1, 2, 3} <= steps
