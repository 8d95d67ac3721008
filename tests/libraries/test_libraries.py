"""Unchanged scripts of TRL, PEFT, sentence-transformers and setfit, equal to their runs on transformers' Trainer."""

import dataclasses
from pathlib import Path

import pytest
import transformers

from littrainer import TrainingArguments
from tests.libraries.sides import Both, described, needs_libraries, run_both

pytestmark = needs_libraries
# Script -> its set-ups, each of which writes into a folder of its name.
SCRIPTS = {
    "trl_sft.py": "accumulation assistant_only defaults lora lora_resumed metrics packing resumed stream",
    "trl_dpo.py": "accumulation given_reference lora precomputed",
    "trl_reward_kto.py": "kto kto_apo kto_precomputed reward reward_lora",
    "trl_grpo.py": "defaults iterations lora resumed synchronized",
    "trl_deeper.py": "bema distillation gkd online_dpo orpo rloo",
    "peft_adapters.py": "adalora adamss lora lora_plus lora_rescaled lora_resumed monteclora prompts",
    "sentence_transformer_trainers.py": (
        "cross_encoding datasets_by_size datasets_in_turn fit matryoshka ranking recreate recreate_by_label "
        "several_vectors similarity similarity_resumed sparse streamed_adapter"
    ),
    "setfit_training.py": "distilled head_of_torch pairs triplets",
}
COMMAND = """
    -m trl.scripts.sft --model_name_or_path models/llama --dataset_name models/chats --output_dir command
    --max_steps 4 --learning_rate 1e-2 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --bf16 False
    --logging_steps 1 --eval_strategy steps --eval_steps 2 --save_steps 2 --report_to none
    --use_peft --lora_r 2 --lora_target_modules q_proj v_proj
"""


def is_about_an_argument_of_ours(line: str) -> bool:
    """Return whether a line of a model card is about an argument that transformers does not have."""
    ours, theirs = (
        {field.name for field in dataclasses.fields(arguments)}
        for arguments in (TrainingArguments, transformers.TrainingArguments)
    )
    path, _, rest = line.partition(": ")
    return path.endswith("card_results.json") and any(rest.startswith(f"- `{name}`:") for name in ours - theirs)


def assert_equal(both: Both, set_ups: list[str]) -> None:
    assert {path.partition("/")[0] for path in both.theirs.values} == set(set_ups)
    assert {path for path in both.theirs.values if path.endswith(".safetensors")}
    assert both.ours.own_files and not both.theirs.own_files
    assert [line for line in described(both) if not is_about_an_argument_of_ours(line)] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_logs_and_saves_bit_for_bit_what_it_does_on_transformers_trainer(script: str, tmp_path: Path) -> None:
    assert_equal(run_both(script, tmp_path), SCRIPTS[script].split())


def test_a_command_of_trl_trains_bit_for_bit_as_on_transformers_trainer(tmp_path: Path) -> None:
    both = run_both(COMMAND.split(), tmp_path)
    assert_equal(both, ["command"])
    assert "Training completed" in both.ours.output
