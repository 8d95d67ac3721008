"""An unchanged script of sentence-transformers, in several set-ups, equal to its run on transformers' Trainer."""

import dataclasses

import pytest
import transformers

from littrainer import TrainingArguments
from tests.libraries.sides import Both, described, needs_libraries

pytestmark = needs_libraries
SCRIPT = "sentence_transformer_trainers.py"
SET_UPS = [
    "cross_encoding",
    "datasets_by_size",
    "datasets_in_turn",
    "fit",
    "made_anew",
    "made_anew_by_label",
    "matryoshka",
    "ranking",
    "several_vectors",
    "similarity",
    "similarity_resumed",
    "sparse",
    "streamed_adapter",
]


def names_of_fields(arguments: type) -> set[str]:
    return {field.name for field in dataclasses.fields(arguments)}


def tells_an_argument_of_ours(line: str) -> bool:
    """Whether it is a line of a model card about an argument that transformers does not have."""
    path, _, rest = line.partition(": ")
    own = names_of_fields(TrainingArguments) - names_of_fields(transformers.TrainingArguments)
    return path.endswith("card_results.json") and any(rest.startswith(f"- `{name}`:") for name in own)


def test_each_set_up_left_values_to_compare(both: Both) -> None:
    assert sorted({path.partition("/")[0] for path in both.theirs.values}) == SET_UPS


@pytest.mark.parametrize("set_up", SET_UPS)
def test_a_model_is_trained_bit_for_bit_as_with_transformers_trainer(both: Both, set_up: str) -> None:
    lines = [line for line in described(both) if line.startswith(f"{set_up}/")]
    assert [line for line in lines if not tells_an_argument_of_ours(line)] == []
