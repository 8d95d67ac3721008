from __future__ import annotations

import argparse
import dataclasses

from littrainer.arguments import TrainingArguments
from littrainer.arguments.parser import HfArgumentParser


@dataclasses.dataclass
class Script:
    """What the script reads.

    A second paragraph.
    """

    data_file: str = dataclasses.field(metadata={"help": "Where 100 % of the data is, by default %(default)s."})
    share: float = dataclasses.field(default=0.5, metadata={"help": "At most 50 % of it.", "unit": "none"})
    shuffle: bool = True


@dataclasses.dataclass
class Named:
    _argument_group_name = "the model"
    depth: int = 2


def page_of(*classes: type) -> str:
    return HfArgumentParser(classes, prog="train.py").format_help()


def test_each_dataclass_has_a_heading_and_the_first_line_of_its_docstring() -> None:
    page = page_of(Script, Named)
    assert "\nScript:\n  What the script reads.\n" in page
    assert "\nthe model:\n" in page
    assert "second paragraph" not in page and "Named(" not in page


def test_an_option_is_shown_once_with_its_kind_of_value_and_its_default() -> None:
    page = page_of(Script)
    assert "--share FLOAT" in page and "(default: 0.5)" in page
    assert "--data_file TEXT" in page and "--data-file" not in page
    assert "--shuffle [BOOL]" in page and "--no_shuffle" in page


def test_a_percent_sign_in_a_help_text_is_just_one() -> None:
    assert "At most 50 % of it." in page_of(Script)


def test_the_usage_line_of_many_options_shows_what_has_to_be_given() -> None:
    assert page_of(Script, TrainingArguments).splitlines()[0] == "usage: train.py [options] --data_file TEXT"


def test_training_arguments_stand_under_their_topics_and_each_of_them_is_there() -> None:
    page = page_of(TrainingArguments)
    assert "\nOutput folder, micro-batch size, duration, learning rate and its schedule:\n" in page
    shown = [line.split()[0] for line in page.splitlines() if line.startswith("  --")]
    for field in dataclasses.fields(TrainingArguments):
        assert shown.count(f"--{field.name}") == 1, field.name


def test_many_choices_stand_in_the_help_and_few_beside_the_option() -> None:
    page = page_of(TrainingArguments)
    assert "--eval_strategy {no,steps,epoch}" in page
    assert "--optim OPTIM" in page
    assert "One of adagrad" in " ".join(page.split())


def test_a_field_without_help_shows_its_default_too() -> None:
    assert [line.split() for line in page_of(Named).splitlines()[-1:]] == [["--depth", "INT", "(default:", "2)"]]
    page = page_of(Script)
    assert "--shuffle [BOOL]" in page and "(default: True)" in page
    plain = HfArgumentParser(Named, prog="train.py", formatter_class=argparse.HelpFormatter).format_help()
    assert plain.count("(default: 2)") == 1


def test_a_field_whose_default_says_nothing_has_none_shown() -> None:
    @dataclasses.dataclass
    class Empty:
        folder: str | None = None
        word: str = ""

    assert "default" not in page_of(Empty)
