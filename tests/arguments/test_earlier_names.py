"""Translation of argument names of earlier transformers releases."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import transformers

from littrainer.arguments import TrainingArguments
from littrainer.arguments.earlier_names import EARLIER_NAMES
from littrainer.arguments.parser import HfArgumentParser

FIELD_NAMES = {field.name for field in dataclasses.fields(TrainingArguments)}

# Fields in transformers 4.57.0 but not in 5.23.0.
REMOVED_SINCE_4_57 = """
overwrite_output_dir per_gpu_train_batch_size per_gpu_eval_batch_size warmup_ratio logging_dir save_safetensors no_cuda
use_mps_device jit_mode_eval fp16_opt_level half_precision_backend tpu_num_cores tpu_metrics_debug past_index
fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap adafactor group_by_length use_legacy_prediction_loop
include_inputs_for_metrics fp16_backend push_to_hub_model_id push_to_hub_organization push_to_hub_token _n_gpu
mp_parameters torchdynamo ray_scope include_tokens_per_second
"""

# Fields of earlier releases of transformers 4.
REMOVED_BEFORE_4_57 = "evaluation_strategy dispatch_batches split_batches"


def test_the_table_has_each_removed_argument_and_no_current_argument() -> None:
    dropped = set((REMOVED_SINCE_4_57 + REMOVED_BEFORE_4_57).split())
    assert dropped <= FIELD_NAMES | EARLIER_NAMES.keys()
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert not EARLIER_NAMES.keys() & (FIELD_NAMES | theirs)
    assert {rule.replaced_by for rule in EARLIER_NAMES.values()} - {None} <= FIELD_NAMES


TRANSLATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"evaluation_strategy": "epoch"}, {"eval_strategy": "epoch"}),
    ({"evaluation_strategy": "epoch", "eval_strategy": "epoch"}, {"eval_strategy": "epoch"}),
    ({"per_gpu_train_batch_size": 3}, {"per_device_train_batch_size": 3}),
    ({"per_gpu_eval_batch_size": 5}, {"per_device_eval_batch_size": 5}),
    ({"push_to_hub_token": "secret"}, {"hub_token": "secret"}),
    ({"no_cuda": True}, {"use_cpu": True}),
    ({"no_cuda": False}, {}),
    ({"adafactor": True}, {"optim": "adafactor"}),
    ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
    ({"include_inputs_for_metrics": True}, {"include_for_metrics": ["inputs"]}),
    (
        {"include_inputs_for_metrics": True, "include_for_metrics": ["loss"]},
        {"include_for_metrics": ["loss", "inputs"]},
    ),
    ({"include_tokens_per_second": True}, {"include_num_input_tokens_seen": "all"}),
    (
        {"include_tokens_per_second": True, "include_num_input_tokens_seen": "non_padding"},
        {"include_num_input_tokens_seen": "non_padding"},
    ),
    ({"push_to_hub_model_id": "name"}, {"hub_model_id": "name"}),
    ({"push_to_hub_organization": "org"}, {"hub_model_id": "org/out"}),
    ({"push_to_hub_organization": "org", "push_to_hub_model_id": "name"}, {"hub_model_id": "org/name"}),
    ({"split_batches": False, "dispatch_batches": None}, {"accelerator_config": {"split_batches": False}}),
    (
        {"split_batches": False, "accelerator_config": '{"use_seedable_sampler": false}'},
        {"accelerator_config": {"use_seedable_sampler": False, "split_batches": False}},
    ),
    ({"fsdp_min_num_params": 0}, {}),
    ({"fsdp_min_num_params": 9, "fsdp": True}, {"fsdp": True, "fsdp_config": {"min_num_params": 9}}),
    (
        {
            "fsdp_transformer_layer_cls_to_wrap": "B",
            "fsdp": True,
            "fsdp_config": {"transformer_layer_cls_to_wrap": "A"},
        },
        {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["A", "B"]}},
    ),
    ({"torchdynamo": "eager"}, {"torch_compile_backend": "eager"}),
    ({"ray_scope": "last", "tpu_num_cores": None, "mp_parameters": "", "past_index": -1}, {}),
    ({"fp16_backend": "auto", "half_precision_backend": "cuda_amp", "fp16_opt_level": "O2"}, {}),
    ({"overwrite_output_dir": True, "use_mps_device": True, "save_safetensors": True}, {}),
    ({"jit_mode_eval": False, "use_legacy_prediction_loop": False}, {}),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"jit_mode_eval": True}, "torch_compile=True"),
    ({"save_safetensors": False}, "always saved as safetensors"),
    ({"past_index": 1}, "no replacement"),
    ({"use_legacy_prediction_loop": True}, "evaluation_loop"),
    ({"mp_parameters": "a=1"}, "SageMaker"),
    ({"_n_gpu": 4}, "each process uses one GPU"),
    ({"fp16_backend": "apex"}, "from torch"),
    ({"half_precision_backend": "apex"}, "from torch"),
    ({"tpu_num_cores": 8}, "TPU_NUM_CORES"),
    ({"ray_scope": "all"}, "RAY_SCOPE"),
]


@dataclasses.dataclass
class Derived(TrainingArguments):
    """Arguments of a script, with fields under earlier names."""

    group_by_length: bool = False
    evaluation_strategy: str = "no"
    no_cuda: bool = dataclasses.field(default_factory=lambda: True)
    per_device_eval_batch_size: int = 2


@pytest.mark.parametrize(("earlier", "today"), TRANSLATED, ids=lambda keywords: ",".join(keywords))
def test_an_earlier_name_is_translated_with_a_warning(earlier: dict[str, Any], today: dict[str, Any]) -> None:
    with pytest.warns(FutureWarning) as record:
        args = TrainingArguments("some/out", **earlier)
    assert args == TrainingArguments("some/out", **today)
    messages = [str(warning.message) for warning in record]
    names = [name for name in earlier if name in EARLIER_NAMES]
    assert len(messages) == len(names)
    assert all(any(message.startswith(name) for message in messages) for name in names)
    assert {warning.filename for warning in record} == {__file__}
    if not today:
        assert all("changes nothing" in message for message in messages)


@pytest.mark.parametrize(("earlier", "advice"), REFUSED, ids=lambda keywords: ",".join(keywords))
def test_a_removed_feature_raises_with_advice(earlier: dict[str, Any], advice: str) -> None:
    (name,) = earlier
    with pytest.raises(ValueError, match=f"TrainingArguments: {name}=.* is no longer possible: .*{advice}"):
        TrainingArguments("out", **earlier)


@pytest.mark.parametrize(
    "keywords",
    [
        {"evaluation_strategy": "epoch", "eval_strategy": "steps"},
        {"per_gpu_train_batch_size": 3, "per_device_train_batch_size": 4},
        {"adafactor": True, "optim": "sgd"},
    ],
)
def test_an_earlier_name_that_contradicts_the_new_name_raises(keywords: dict[str, Any]) -> None:
    earlier, today = keywords
    with pytest.raises(ValueError, match=f"{earlier}=.* contradicts {today}=.*alone"):
        TrainingArguments("out", **keywords)


def test_warnings_and_errors_never_show_a_token() -> None:
    with pytest.warns(FutureWarning) as record:
        TrainingArguments("out", push_to_hub_token="hf_secret")  # type: ignore[call-arg]
    assert "hub_token" in str(record[0].message) and "hf_secret" not in str(record[0].message)
    with pytest.raises(ValueError) as caught:
        TrainingArguments("out", push_to_hub_token="hf_secret", hub_token="hf_other", past_index=3)  # type: ignore[call-arg]
    assert "hf_" not in str(caught.value) and "push_to_hub_token" in str(caught.value)
    assert "past_index=3" in str(caught.value)


def test_a_field_with_an_earlier_name_is_translated() -> None:
    with pytest.warns(FutureWarning, match="no_cuda=True is an earlier spelling: write use_cpu=True") as warned:
        args = Derived("out", per_gpu_eval_batch_size=5)  # type: ignore[call-arg]
    assert (args.use_cpu, args.no_cuda, args.eval_strategy, args.train_sampling_strategy) == (
        True,
        True,
        "no",
        "random",
    )
    assert (len(warned), args.per_device_eval_batch_size) == (2, 5)
    with pytest.warns(FutureWarning, match="write train_sampling_strategy='group_by_length'"):
        (args,) = HfArgumentParser(Derived).parse_args_into_dataclasses(
            ["--group_by_length", "--evaluation_strategy", "epoch"]
        )
    for each in (args, dataclasses.replace(args, seed=3), pickle.loads(pickle.dumps(args))):
        assert (each.eval_strategy, each.train_sampling_strategy, each.group_by_length) == (
            "epoch",
            "group_by_length",
            True,
        )


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_new_name_overrides_only_the_default_of_a_field_with_an_earlier_name() -> None:
    assert Derived("out", eval_strategy="steps").eval_strategy == "steps"
    with pytest.raises(ValueError, match="Derived: evaluation_strategy='epoch' contradicts eval_strategy='steps'"):
        Derived("out", evaluation_strategy="epoch", eval_strategy="steps")

    @dataclasses.dataclass
    class Impossible(TrainingArguments):
        past_index: int = 7

    with pytest.raises(ValueError, match="past_index=7 is no longer possible"):
        Impossible("out")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_the_new_name_overrides_a_field_with_an_earlier_name_in_a_copy(strategy: str) -> None:
    args = Derived("out", evaluation_strategy="steps")
    assert args.eval_strategy == "steps" and dataclasses.replace(args, eval_strategy=strategy).eval_strategy == strategy


def test_an_unset_earlier_name_has_its_former_default() -> None:
    args = TrainingArguments("out")
    defaults = {
        "evaluation_strategy": "no",
        "per_gpu_train_batch_size": 8,
        "per_gpu_eval_batch_size": 8,
        "dispatch_batches": None,
        "split_batches": False,
    }
    for name in EARLIER_NAMES.keys() - {"_n_gpu", "no_cuda"}:
        assert getattr(args, name) == defaults.get(name, EARLIER_NAMES[name].idle[0])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_earlier_name_keeps_its_value_in_copies() -> None:
    make: Any = TrainingArguments
    keywords = dict.fromkeys(("overwrite_output_dir", "no_cuda", "include_inputs_for_metrics"), True)
    args = make("out", evaluation_strategy="epoch", **keywords)
    for each in (args, copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert {name: getattr(each, name) for name in keywords} == keywords
    assert dataclasses.replace(args, seed=3).use_cpu is True
    assert "overwrite_output_dir" not in args.to_dict()
    args.eval_strategy = "steps"
    assert args.evaluation_strategy == "steps"


def test_setting_an_earlier_name_sets_the_new_argument_and_warns() -> None:
    args: Any = TrainingArguments("out")
    with pytest.warns(FutureWarning, match="eval_strategy='epoch'"):
        args.evaluation_strategy = "epoch"
    assert args.eval_strategy == "epoch"
    with pytest.warns(FutureWarning, match="train_sampling_strategy='group_by_length'"):
        args.group_by_length = True
    assert args.train_sampling_strategy == "group_by_length"
    with pytest.warns(FutureWarning, match="train_sampling_strategy='random'"):
        args.group_by_length = False
    assert args.train_sampling_strategy == "random"
    with pytest.raises(ValueError, match="past_index=2"):
        args.past_index = 2


def test_all_unknown_names_are_listed_in_a_single_line() -> None:
    with pytest.raises(TypeError) as caught:
        TrainingArguments(learning_rte=1, no_cudaa=True, zzzzqqqq=1)  # type: ignore[call-arg]
    message = str(caught.value)
    assert "\n" not in message
    for part in ("'learning_rte'", "'learning_rate'", "'no_cudaa'", "'zzzzqqqq'", "no known name"):
        assert part in message
    with pytest.raises(TypeError, match=r"Derived: 'group_by_lenth' .* did you mean 'group_by_length'"):
        Derived(group_by_lenth=True)  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_constructor_with_arbitrary_keywords_may_filter_them() -> None:
    class Tolerant(TrainingArguments):
        def __init__(self, **keywords: Any) -> None:
            self.extra = keywords.pop("extra", None)
            super().__init__(**keywords)

    args = Tolerant(extra=3, evaluation_strategy="epoch")
    assert (args.extra, args.eval_strategy) == (3, "epoch")
