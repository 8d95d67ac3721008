from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from littrainer.arguments import TrainingArguments
from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.choices import IntervalStrategy


@dataclasses.dataclass
class DerivedArguments(TrainingArguments):
    """Subclass like those of libraries: new defaults, fields, dict fields and computed values."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    learning_rate: float = 1e-6
    logging_steps: float = 10
    bf16: bool | None = None
    model_init_kwargs: dict[str, Any] | str | None = None
    max_length: int = 512

    def __post_init__(self) -> None:
        self.bf16 = bool(self.bf16)
        super().__post_init__()
        self.effective_length = self.max_length - 2


def test_a_subclass_adds_fields_and_changes_defaults() -> None:
    args = DerivedArguments("out", 4, eval_strategy="steps", model_init_kwargs='{"depth": "3"}')
    assert (args.output_dir, args.per_device_train_batch_size) == ("out", 4)
    assert (args.learning_rate, args.eval_steps, args.bf16) == (1e-6, 10, False)
    assert args.model_init_kwargs == {"depth": 3}
    assert args.effective_length == 510
    assert DerivedArguments("out", max_length=8).effective_length == 6


@pytest.mark.parametrize("cls", [TrainingArguments, DerivedArguments])
def test_copies_do_not_request_progress_bars(cls: type[TrainingArguments]) -> None:
    args = cls("out", accelerator_config={"split_batches": True})
    for copied in (dataclasses.replace(args, seed=7), cls(**args.to_dict()), copy.deepcopy(args)):
        assert copied.disable_tqdm is False and not copied._asked_for_bars
    assert cls("out", disable_tqdm=False, accelerator_config={"split_batches": True})._asked_for_bars
    assert cls("out", disable_tqdm=False, accelerator_config=AcceleratorConfig())._asked_for_bars


@pytest.mark.parametrize("cls", [TrainingArguments, DerivedArguments])
def test_pickled_and_copied_arguments_are_equal(cls: type[TrainingArguments], tmp_path: Path) -> None:
    args = cls("out", eval_strategy="epoch", lr_scheduler_kwargs={"power": 2.0})
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    for other in (loaded, copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert type(other) is cls
        assert other == args
        assert vars(other) == vars(args)
        assert other.eval_strategy is IntervalStrategy.EPOCH


@pytest.mark.parametrize("cls", [transformers.TrainingArguments, TrainingArguments])
def test_arguments_can_be_rebuilt_from_their_dict_and_with_a_replaced_value(cls: Any) -> None:
    args = cls("out", eval_strategy="epoch", load_best_model_at_end=True, save_strategy="epoch", use_cpu=True)
    assert cls(**args.to_dict()).to_dict() == args.to_dict()
    replaced = dataclasses.replace(args, learning_rate=1.0)
    assert replaced.to_dict() == {**args.to_dict(), "learning_rate": 1.0} and args.learning_rate == 5e-5


@pytest.mark.parametrize("warmup_steps", [0, 0.01, 0.1, 0.999, 1, 1.0, 7, 7.9])
@pytest.mark.parametrize("total_steps", [1, 33, 1000])
def test_warmup_steps_equal_those_of_transformers(warmup_steps: float, total_steps: int) -> None:
    ours = TrainingArguments(warmup_steps=warmup_steps)
    theirs = transformers.TrainingArguments(warmup_steps=warmup_steps)
    assert ours.get_warmup_steps(total_steps) == theirs.get_warmup_steps(total_steps)


def test_arguments_import_neither_torch_nor_lightning_nor_transformers() -> None:
    program = (
        "import sys; from littrainer.arguments.training_arguments import TrainingArguments; "
        "args = TrainingArguments('out', eval_strategy='epoch', dataloader_num_workers=2); args.to_dict(), str(args); "
        "print([name for name in ('torch', 'lightning', 'transformers') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
