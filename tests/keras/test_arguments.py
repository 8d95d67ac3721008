from pathlib import Path

import pytest

from littrainer import TFTrainingArguments
from littrainer.arguments.choices import SchedulerType


@pytest.mark.parametrize("name", ["tpu_name", "tpu_zone", "gcp_project", "xla"])
def test_what_needs_tensorflow_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{name}='mine'.*TensorFlow.*Leave it out"):
        TFTrainingArguments(str(tmp_path), **{name: "mine"})


def test_a_power_of_the_decay_chooses_the_polynomial_schedule(tmp_path: Path) -> None:
    args = TFTrainingArguments(str(tmp_path), poly_power=2.0)
    assert args.lr_scheduler_type is SchedulerType.POLYNOMIAL
    assert args.lr_scheduler_kwargs == {"lr_end": 0.0, "power": 2.0}
    again = TFTrainingArguments(**args.to_dict())
    assert (again.poly_power, again.lr_scheduler_kwargs) == (2.0, args.lr_scheduler_kwargs)
    assert TFTrainingArguments(str(tmp_path)).lr_scheduler_type is SchedulerType.LINEAR


def test_a_power_and_another_schedule_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"poly_power=2.0.*lr_scheduler_type is 'cosine'"):
        TFTrainingArguments(str(tmp_path), poly_power=2.0, lr_scheduler_type="cosine")


def test_a_model_can_be_made_in_the_scope_of_the_strategy(tmp_path: Path) -> None:
    args = TFTrainingArguments(str(tmp_path), use_cpu=True)
    with args.strategy.scope():
        pass
    assert args.strategy.num_replicas_in_sync == args.n_replicas == 1
