from __future__ import annotations

import pytest
from accelerate.utils import DeepSpeedPlugin

from littrainer import TrainingArguments
from littrainer.distributed.accelerate_launch import REFUSED_VARIABLES, launcher_settings, refused_variables
from tests.distributed.launchers import set_only

DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}


def test_without_a_launcher_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, ACCELERATE_USE_DEEPSPEED="False", ACCELERATE_DEEPSPEED_ZERO_STAGE="2")
    assert launcher_settings() == {}


def test_deepspeeds_configuration_is_the_one_that_accelerate_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **DEEPSPEED)
    found = launcher_settings()
    ours, theirs = found["deepspeed"], DeepSpeedPlugin().deepspeed_config
    assert found["zero3_init"] is False
    assert ours["zero_optimization"]["stage"] == theirs["zero_optimization"]["stage"] == 3
    assert ours["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in ours["zero_optimization"]
    for name in ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"):
        assert ours[name] == theirs[name]
    key = "stage3_gather_16bit_weights_on_model_save"
    assert ours["zero_optimization"][key] is theirs["zero_optimization"][key] is True


def test_deepspeed_alone_means_stage_2_and_open_values_from_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, ACCELERATE_USE_DEEPSPEED="true")
    config = launcher_settings()["deepspeed"]
    assert config["zero_optimization"]["stage"] == DeepSpeedPlugin().zero_stage == 2
    assert config["gradient_accumulation_steps"] == config["gradient_clipping"] == config["train_batch_size"] == "auto"


def test_a_file_of_deepspeeds_is_handed_on_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE="zero3.json")
    assert launcher_settings()["deepspeed"] == "zero3.json"


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "perhaps"}, "ACCELERATE_USE_DEEPSPEED='perhaps' is neither true nor false"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "two"},
            "ACCELERATE_DEEPSPEED_ZERO_STAGE='two' must be a whole number",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_CLIPPING": "much"},
            "ACCELERATE_GRADIENT_CLIPPING='much' must be a number",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_by_variable(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], complaint: str
) -> None:
    set_only(monkeypatch, **variables)
    with pytest.raises(ValueError, match=complaint):
        launcher_settings()


@pytest.mark.parametrize("name", REFUSED_VARIABLES)
def test_what_is_not_carried_out_is_refused_by_variable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    set_only(monkeypatch, **{name: "true"})
    assert refused_variables() == {name: "true"}
    with pytest.raises(NotImplementedError, match=f"environment variable {name}=true"):
        TrainingArguments("out", use_cpu=True)
