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
from littrainer.checkpoint.checksums import files_in, note_changes, write_manifest
from littrainer.checkpoint.distributed_resume import checkpoint_to_resume
from littrainer.checkpoint.verification import get_last_checkpoint, has_finite_weights, newest_healthy_checkpoint
from littrainer.checkpoint.weights import weights_are_finite, write_weights
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


def told(weights: dict[str, torch.Tensor], folder: Path, *buffers: str) -> bool | None:
    save_file(weights, folder / "model.safetensors")
    return weights_are_finite(folder, files_in(folder), buffers)


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("number", [NAN, INFINITE])
def test_one_number_of_any_format_tells(tmp_path: Path, numbers: torch.Tensor, number: float) -> None:
    sick = numbers.clone()
    sick[1] = number
    assert told({"a": numbers}, tmp_path) is True
    assert told({"a": numbers, "b": sick}, tmp_path) is False


def test_a_buffer_may_be_infinite_as_masks_are_and_has_to_be_a_number(tmp_path: Path) -> None:
    mask = torch.tensor([0.0, INFINITE])
    assert told({"mask": mask}, tmp_path, "encoder.mask") is True
    assert told({"mask": mask, "task": mask.clone()}, tmp_path, "encoder.mask") is False
    assert told({"mask": torch.tensor([NAN, INFINITE])}, tmp_path, "encoder.mask") is False


def test_whole_numbers_empty_tensors_and_formats_of_one_byte_are_finite(tmp_path: Path) -> None:
    quantized = torch.tensor([1, 255], dtype=torch.uint8)
    rows = {"codes": quantized, "scaled": quantized.clone().view(torch.float8_e4m3fn), "empty": torch.empty(0)}
    assert told(rows, tmp_path) is True


def test_nothing_is_known_of_a_folder_whose_weights_cannot_be_read(tmp_path: Path) -> None:
    assert weights_are_finite(tmp_path, [], ()) is None
    assert weights_are_finite(tmp_path, [], (), parts_are_finite=False) is False
    (tmp_path / "pytorch_model.bin").write_bytes(b"written by a script")
    assert told({"a": torch.ones(2)}, tmp_path) is None
    torch.save({"a": torch.tensor(NAN)}, tmp_path / "pytorch_model.bin")
    assert told({"a": torch.ones(2)}, tmp_path) is False


def test_weights_in_several_files_are_all_looked_at(tmp_path: Path) -> None:
    model = tiny_bert_tagger()
    for number, expected in ((0.0, True), (NAN, False)):
        model.classifier.bias.data[0] = number
        write_weights(model, tmp_path, max_shard_size="5KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        assert weights_are_finite(tmp_path, files_in(tmp_path), ()) is expected


class Masked(VectorClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), INFINITE).triu(1))


class Harm(TrainerCallback):
    """Makes one number of the parameter that comes last infinite after the second step."""

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
def test_a_checkpoint_says_whether_its_weights_are_finite(
    tmp_path: Path, make: Callable[[], nn.Module], changes: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"callbacks": [Harm()]}
    if make is not Masked:
        given |= {"train_dataset": tag_rows(10), "data_collator": DataCollatorForTokenClassification(tiny_tokenizer())}
    quiet_trainer(tmp_path, make(), given=given, **EACH_STEP, **changes).train()
    assert has_finite_weights(tmp_path / "checkpoint-1") is True
    assert has_finite_weights(tmp_path / "checkpoint-2") is False
    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def test_what_a_users_code_changes_afterwards_is_not_known_to_be_finite(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    write_manifest(tmp_path, weights_are_finite=True)
    (tmp_path / "notes.txt").touch()
    note_changes(tmp_path)
    assert has_finite_weights(tmp_path) is True
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    note_changes(tmp_path)
    assert has_finite_weights(tmp_path) is None
    write_manifest(tmp_path, weights_are_finite=False)
    (tmp_path / "littrainer_manifest.json").write_text("{")
    assert has_finite_weights(tmp_path) is None


def folders(root: Path, finite: dict[int, bool | None]) -> Path:
    for step, are_finite in finite.items():
        folder = root / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        write_manifest(folder, sequence=step, weights_are_finite=are_finite)
    return root


def test_resuming_from_the_newest_passes_over_sick_checkpoints_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders(tmp_path, {1: True, 2: None, 3: False, 4: False})
    assert checkpoint_to_resume(True, str(tmp_path), needed=()) == tmp_path / "checkpoint-2"
    (warning,) = caplog.messages
    assert f"{tmp_path / 'checkpoint-4'}, {tmp_path / 'checkpoint-3'}" in warning
    assert f"{tmp_path / 'checkpoint-2'} is the newest one before" in warning
    caplog.clear()
    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-2" and not caplog.messages


def test_a_folder_of_sick_checkpoints_is_resumed_by_name_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders(tmp_path, {3: False})
    assert get_last_checkpoint(tmp_path) is None and newest_healthy_checkpoint(tmp_path) is None
    caplog.clear()
    folder = tmp_path / "checkpoint-3"
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_resume(str(folder), str(tmp_path), needed=()) == folder
    assert [str(folder) in message and "finite" in message for message in caplog.messages] == [True]
    assert newest_healthy_checkpoint(tmp_path / "none") is None
