"""Unchanged scripts of TRL's trainers, equal to their runs on transformers' Trainer."""

from pathlib import Path

import pytest

from tests.libraries.sides import Both, described, needs_libraries, run_both

pytestmark = needs_libraries
# Script -> its set-ups, each of which writes into a folder of its name.
SCRIPTS = {
    "trl_sft.py": [
        "accumulation",
        "assistant_only",
        "defaults",
        "lora",
        "lora_resumed",
        "metrics",
        "packing",
        "resumed",
        "stream",
    ],
    "trl_dpo.py": ["accumulation", "given_reference", "lora", "precomputed"],
    "trl_reward_kto.py": ["kto", "kto_apo", "kto_precomputed", "reward", "reward_lora"],
    "trl_grpo.py": ["defaults", "iterations", "lora", "resumed", "synchronized"],
    "trl_deeper.py": ["bema", "distillation", "gkd", "online_dpo", "orpo", "rloo"],
}
COMMAND = """
    -m trl.scripts.sft --model_name_or_path models/llama --dataset_name models/chats --output_dir command
    --max_steps 4 --learning_rate 1e-2 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --bf16 False
    --logging_steps 1 --eval_strategy steps --eval_steps 2 --save_steps 2 --report_to none
    --use_peft --lora_r 2 --lora_target_modules q_proj v_proj
"""


def assert_equal(both: Both, set_ups: list[str]) -> None:
    for kind in ("trainer_state.json", ".safetensors"):
        compared = {path.partition("/")[0] for path in both.theirs.values if path.endswith(kind)}
        assert sorted(compared) == set_ups
    assert both.ours.own_files
    assert not both.theirs.own_files
    assert described(both) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_logs_and_saves_bit_for_bit_what_it_does_on_transformers_trainer(script: str, tmp_path: Path) -> None:
    assert_equal(run_both(script, tmp_path), SCRIPTS[script])


def test_a_command_of_trl_trains_bit_for_bit_as_on_transformers_trainer(tmp_path: Path) -> None:
    both = run_both(COMMAND.split(), tmp_path)
    assert_equal(both, ["command"])
    assert "Training completed" in both.ours.output
