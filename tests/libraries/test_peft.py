"""An unchanged script that trains adapters of PEFT with a plain Trainer, equal to its run on transformers' Trainer."""

import pytest

from tests.libraries.sides import Both, described, needs_libraries

pytestmark = needs_libraries
SCRIPT = "peft_adapters.py"
SET_UPS = ["adalora", "adamss", "lora", "lora_plus", "lora_rescaled", "lora_resumed", "monteclora", "prompts"]


def test_each_set_up_left_values_to_compare(both: Both) -> None:
    assert sorted({path.partition("/")[0] for path in both.theirs.values}) == SET_UPS
    weights = [path for path in both.theirs.values if path.endswith("adapter_model.safetensors")]
    assert len(weights) > len(SET_UPS)


@pytest.mark.parametrize("set_up", SET_UPS)
def test_an_adapter_is_trained_bit_for_bit_as_with_transformers_trainer(both: Both, set_up: str) -> None:
    assert [line for line in described(both) if line.startswith(f"{set_up}/")] == []
