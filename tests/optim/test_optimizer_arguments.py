from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.trainer_optimizer import _parse_optim_args

from littrainer.optim.optimizers import Convert, parse_optim_args, read_optim_args, torch_dtype, truth

ACCEPTED: dict[str, Convert] = {"rank": int, "scale": float, "on": truth, "kind": str}


@pytest.mark.parametrize("text", [None, "", "rank=4", "rank=4,scale=0.5", " rank = 4 , scale=0.5 ", "rank=4,rank=5"])
def test_pairs_are_read_as_transformers_reads_them(text: str | None) -> None:
    assert parse_optim_args(text) == _parse_optim_args(text)


@pytest.mark.parametrize("text", ["rank", "rank=4=5", "rank=4,", "=4", "rank=", "rank:4", "{'rank': 4}"])
def test_text_that_is_no_list_of_pairs_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"optim_args=.*key=value,key=value"):
        parse_optim_args(text)


def test_what_is_no_text_is_refused() -> None:
    not_text: Any = {"rank": 4}
    with pytest.raises(TypeError, match=r"optim_args=\{'rank': 4\} has to be text.*not dict"):
        parse_optim_args(not_text)


def test_each_setting_gets_the_type_that_the_optimizer_takes() -> None:
    settings = read_optim_args("galore_adamw", "rank=4,scale=1,on=No,kind=std", ACCEPTED)
    assert settings == {"rank": 4, "scale": 1.0, "on": False, "kind": "std"}
    assert [type(value) for value in settings.values()] == [int, float, bool, str]


def test_an_unknown_key_is_refused_with_the_nearest_one_and_all_there_are() -> None:
    with pytest.raises(ValueError, match=r"'rnak'.*optim='galore_adamw'.*did you mean 'rank'.*rank, scale, on, kind"):
        read_optim_args("galore_adamw", "rnak=4", ACCEPTED)


def test_a_key_for_an_optimizer_without_settings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'rank'.*optim='adamw_torch'.*takes none, so leave optim_args unset"):
        read_optim_args("adamw_torch", "rank=4", {})


@pytest.mark.parametrize("text", ["rank=four", "rank=4.5", "scale=high", "on=perhaps"])
def test_a_value_of_the_wrong_kind_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(ValueError, match=f"optim_args has {text}, which optim='galore_adamw' cannot read"):
        read_optim_args("galore_adamw", text, ACCEPTED)


@pytest.mark.parametrize(("text", "value"), [("True", True), ("yes", True), ("1", True), ("off", False), ("0", False)])
def test_a_truth_value_has_many_spellings(text: str, value: bool) -> None:
    assert truth(text) is value


def test_a_dtype_is_named_as_in_torch() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    for text in ("float33", "nn"):
        with pytest.raises(ValueError, match=f"dtype.*{text}"):
            torch_dtype(text)


def test_adafactor_may_be_asked_for_what_it_is_given_anyway() -> None:
    assert read_optim_args("adafactor", "scale_parameter=False,relative_step=False", {}) == {}
    with pytest.raises(ValueError, match="scale_parameter"):
        read_optim_args("adafactor", "scale_parameter=True", {})
