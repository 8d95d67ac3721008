from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import DataCollatorForTokenClassification

from littrainer import TrainerCallback
from littrainer.checkpoint.checksums import update_manifest, write_manifest
from littrainer.checkpoint.manager import CheckpointManager, get_last_checkpoint
from littrainer.checkpoint.verification import read_manifest_or_empty
from littrainer.checkpoint.weights import find_nonfinite_weights
from tests.scenarios.data import tag_rows, tiny_tokenizer
from tests.scenarios.models import VectorClassifier, tiny_bert_tagger, tiny_lora_tagger
from tests.scenarios.trainers import quiet_trainer

NAN, INFINITE = math.nan, -math.inf
NUMBERS = {
    "single": torch.ones(3),
    "half": torch.ones(3, dtype=torch.float16),
    "brain": torch.ones(3, dtype=torch.bfloat16),
    "complex": torch.ones(3, dtype=torch.complex64),
    "near the end of the range": torch.full((3,), 3e38),
}


def are_finite(numbers: torch.Tensor, *buffers: torch.Tensor) -> bool:
    model = nn.ParameterList([nn.Parameter(numbers, requires_grad=False)])
    for number, buffer in enumerate(buffers):
        model.register_buffer(f"buffer{number}", buffer)
    return not find_nonfinite_weights(model, with_buffers=True)


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
def test_a_nonfinite_number_of_any_dtype_is_detected(numbers: torch.Tensor) -> None:
    assert are_finite(numbers)
    for number in (NAN, INFINITE):
        nonfinite = numbers.clone()
        nonfinite[1] = number
        assert not are_finite(nonfinite)


def test_a_buffer_may_be_infinite_but_not_nan() -> None:
    weight, mask = torch.ones(2), torch.tensor([0.0, INFINITE])
    assert are_finite(weight, mask) and not are_finite(weight, mask, torch.tensor([NAN, INFINITE]))
    model = nn.Module()
    model.register_buffer("scratch", torch.tensor(NAN), persistent=False)
    assert not find_nonfinite_weights(model, with_buffers=True)


def test_integers_empty_tensors_and_one_byte_dtypes_are_finite() -> None:
    quantized = torch.tensor([1, 255], dtype=torch.uint8)
    assert all(map(are_finite, (quantized, quantized.clone().view(torch.float8_e4m3fn), torch.empty(0))))


class Masked(VectorClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), INFINITE).triu(1))


class Harm(TrainerCallback):
    """A callback that sets a number of the last parameter to infinity after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            trained[-1].data.view(-1)[0] = INFINITE


EACH_STEP: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (Masked, {}),
    "in the background": (Masked, {"async_save": True}),
    "of transformers": (tiny_bert_tagger, {}),
    "adapters": (tiny_lora_tagger, {"async_save": True}),
}


@pytest.mark.parametrize(("make", "changes"), KINDS.values(), ids=KINDS.keys())
def test_a_manifest_records_whether_weights_are_finite(
    tmp_path: Path, make: Callable[[], nn.Module], changes: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"callbacks": [Harm()]}
    if make is not Masked:
        options |= {
            "train_dataset": tag_rows(10),
            "data_collator": DataCollatorForTokenClassification(tiny_tokenizer()),
        }
    quiet_trainer(tmp_path, make(), trainer_kwargs=options, **EACH_STEP, **changes).train()
    assert read_manifest_or_empty(tmp_path / "checkpoint-1").weights_are_finite is True
    assert read_manifest_or_empty(tmp_path / "checkpoint-2").weights_are_finite is False
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


class HarmOptimizer(TrainerCallback):
    """A callback that sets optimizer moments to infinity, and to nan after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        first, *_, last = optimizer.state.values()
        first["exp_avg_sq"].view(-1)[0] = math.inf
        if state.global_step == 2:
            last["exp_avg"].view(-1)[0] = NAN


@pytest.mark.parametrize("save_only_model", [False, True])
def test_nan_in_a_saved_optimizer_state_is_recorded(tmp_path: Path, save_only_model: bool) -> None:
    options = {"callbacks": [HarmOptimizer()]}
    quiet_trainer(
        tmp_path, VectorClassifier(), trainer_kwargs=options, save_only_model=save_only_model, **EACH_STEP
    ).train()
    are_finite = [read_manifest_or_empty(tmp_path / f"checkpoint-{step}").weights_are_finite for step in (1, 2)]
    assert are_finite == [True, save_only_model]


def test_weights_that_user_code_changes_are_not_recorded_as_finite(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    write_manifest(tmp_path, weights_are_finite=True)
    (tmp_path / "notes.txt").touch()
    update_manifest(tmp_path)
    assert read_manifest_or_empty(tmp_path).weights_are_finite is True
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    update_manifest(tmp_path)
    assert read_manifest_or_empty(tmp_path).weights_are_finite is None
    write_manifest(tmp_path, weights_are_finite=False)
    (tmp_path / "littrainer_manifest.json").write_text("{")
    assert read_manifest_or_empty(tmp_path).weights_are_finite is None


def make_checkpoints(root: Path, finite: dict[int, bool | None]) -> Path:
    for step, are_finite in finite.items():
        folder = root / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        write_manifest(folder, sequence=step, weights_are_finite=are_finite)
    return root


def test_resuming_skips_nonfinite_checkpoints_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoints(tmp_path, {1: True, 2: None, 3: False, 4: False})
    assert CheckpointManager().find(True, str(tmp_path), needed=()) == tmp_path / "checkpoint-2"
    (warning,) = caplog.messages
    assert f"{tmp_path / 'checkpoint-4'}, {tmp_path / 'checkpoint-3'}" in warning
    assert f"{tmp_path / 'checkpoint-2'} is the newest finite one" in warning


def test_a_nonfinite_checkpoint_is_resumed_only_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoints(tmp_path, {3: False})
    assert get_last_checkpoint(tmp_path) is None
    caplog.clear()
    folder = tmp_path / "checkpoint-3"
    with caplog.at_level(logging.WARNING):
        assert CheckpointManager().find(str(folder), str(tmp_path), needed=()) == folder
    assert [str(folder) in message and "finite" in message for message in caplog.messages] == [True]
