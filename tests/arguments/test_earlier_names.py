from __future__ import annotations

import dataclasses

import pytest
import transformers

from littrainer.arguments import TrainingArguments
from littrainer.arguments.earlier_names import EARLIER_NAMES

FIELD_NAMES = {field.name for field in dataclasses.fields(TrainingArguments)}

# What TrainingArguments of transformers 4.57.0 had as fields and that of 5.23.0 has not.
GONE_SINCE_4_57 = """
overwrite_output_dir per_gpu_train_batch_size per_gpu_eval_batch_size warmup_ratio logging_dir save_safetensors no_cuda
use_mps_device jit_mode_eval fp16_opt_level half_precision_backend tpu_num_cores tpu_metrics_debug past_index
fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap adafactor group_by_length use_legacy_prediction_loop
include_inputs_for_metrics fp16_backend push_to_hub_model_id push_to_hub_organization push_to_hub_token _n_gpu
mp_parameters torchdynamo ray_scope include_tokens_per_second
"""

# What earlier releases of transformers 4, or 3, had.
GONE_BEFORE_4_57 = """
evaluation_strategy evaluate_during_training dispatch_batches split_batches sharded_ddp use_ipex xpu_backend
"""


@pytest.mark.parametrize("name", (GONE_SINCE_4_57 + GONE_BEFORE_4_57).split())
def test_each_argument_that_transformers_dropped_is_one_of_ours_or_in_the_table(name: str) -> None:
    assert name in FIELD_NAMES or name in EARLIER_NAMES


@pytest.mark.parametrize("name", sorted(EARLIER_NAMES))
def test_no_name_of_the_table_is_an_argument_today(name: str) -> None:
    assert name not in FIELD_NAMES
    assert name not in {field.name for field in dataclasses.fields(transformers.TrainingArguments)}


def test_the_arguments_that_took_over_exist() -> None:
    assert {rule.replaced_by for rule in EARLIER_NAMES.values()} - {None} <= FIELD_NAMES


def test_a_value_asks_for_nothing_only_in_its_own_type() -> None:
    assert EARLIER_NAMES["past_index"].asks_for_nothing(-1)
    assert EARLIER_NAMES["no_cuda"].asks_for_nothing(False)
    assert not EARLIER_NAMES["no_cuda"].asks_for_nothing(0)
    assert not EARLIER_NAMES["save_safetensors"].asks_for_nothing(False)
