from __future__ import annotations

import json

import pytest
import transformers.debug_utils
import transformers.trainer_utils
import transformers.training_args

from littrainer.arguments import choices

ORACLE_MODULES = {
    "IntervalStrategy": transformers.trainer_utils,
    "SaveStrategy": transformers.trainer_utils,
    "HubStrategy": transformers.trainer_utils,
    "SchedulerType": transformers.trainer_utils,
    "HPSearchBackend": transformers.trainer_utils,
    "FSDPOption": transformers.trainer_utils,
    "OptimizerNames": transformers.training_args,
    "ParallelMode": transformers.training_args,
    "DebugOption": transformers.debug_utils,
}


@pytest.mark.parametrize("name", ORACLE_MODULES)
def test_each_choice_has_the_members_and_values_of_transformers(name: str) -> None:
    theirs = getattr(ORACLE_MODULES[name], name)
    ours = getattr(choices, name)
    assert {member.name: member.value for member in ours} == {member.name: member.value for member in theirs}


def test_a_member_behaves_as_its_string_where_that_of_transformers_does() -> None:
    theirs = transformers.trainer_utils.IntervalStrategy.EPOCH
    ours = choices.IntervalStrategy.EPOCH
    assert ours == "epoch" == ours.value
    assert ours == choices.SaveStrategy.EPOCH and choices.EvaluationStrategy is choices.IntervalStrategy
    assert hash(ours) == hash("epoch")
    assert json.dumps(ours) == json.dumps(theirs) == '"epoch"'
    assert (str(ours), f"{ours}", repr(ours)) == (str(theirs), f"{theirs}", repr(theirs))


def test_a_member_of_transformers_own_enum_converts_to_ours() -> None:
    assert choices.OptimizerNames(transformers.training_args.OptimizerNames.SGD) is choices.OptimizerNames.SGD


def test_a_wrong_value_is_refused_with_the_enum_the_value_and_the_valid_values() -> None:
    with pytest.raises(ValueError, match=r"'never' is not a valid IntervalStrategy.*'no', 'steps', 'epoch'"):
        choices.IntervalStrategy("never")


@pytest.mark.parametrize(("earlier", "today"), [("adamw_hf", "adamw_torch"), ("adamw_apex_fused", "adamw_torch_fused")])
def test_an_optimizer_name_of_transformers_4_becomes_that_of_today_with_a_warning(earlier: str, today: str) -> None:
    with pytest.warns(FutureWarning, match=f"write '{today}'"):
        assert choices.OptimizerNames(earlier).value == today
