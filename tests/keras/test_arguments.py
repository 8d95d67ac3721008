from pathlib import Path

import pytest

from littrainer import TFTrainingArguments
from littrainer.arguments.choices import SchedulerType


@pytest.mark.parametrize("name", ["tpu_name", "tpu_zone", "gcp_project", "xla"])
def test_arguments_that_need_tensorflow_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{name}='mine'.*TensorFlow.*Leave it out"):
        TFTrainingArguments(str(tmp_path), **{name: "mine"})


def test_poly_power_selects_the_polynomial_schedule(tmp_path: Path) -> None:
    args = TFTrainingArguments(str(tmp_path), poly_power=2.0)
    assert args.lr_scheduler_type is SchedulerType.POLYNOMIAL
    assert args.lr_scheduler_kwargs == {"lr_end": 0.0, "power": 2.0}
    restored = TFTrainingArguments(**args.to_dict())
    assert (restored.poly_power, restored.lr_scheduler_kwargs) == (2.0, args.lr_scheduler_kwargs)
    assert TFTrainingArguments(str(tmp_path)).lr_scheduler_type is SchedulerType.LINEAR


def test_poly_power_with_another_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"poly_power=2.0.*lr_scheduler_type is 'cosine'"):
        TFTrainingArguments(str(tmp_path), poly_power=2.0, lr_scheduler_type="cosine")


def test_the_strategy_has_a_scope(tmp_path: Path) -> None:
    args = TFTrainingArguments(str(tmp_path), use_cpu=True)
    with args.strategy.scope():
        pass
    assert args.strategy.num_replicas_in_sync == args.n_replicas == 1
