"""HfArgumentParser parses like transformers' parser, and accepts more."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import transformers
from transformers.hf_argparser import HfArg

from littrainer.arguments import TrainingArguments
from littrainer.arguments.parser import HfArgumentParser
from tests.compat.processes import facts_of


class Color(Enum):
    RED = "red"
    BLUE = "blue"
    SEVEN = 7


@dataclasses.dataclass
class Everything:
    """Fields of each kind that both parsers support."""

    name: str = dataclasses.field(metadata={"help": "A name.", "aliases": ["-n"]})
    count: int = 3
    rate: float = 0.5
    loud: bool = False
    keep: bool = True
    maybe: bool | None = None
    surely: bool | None = True
    level: Optional[int] = None  # noqa: UP045
    ratio: Union[float, None] = None  # noqa: UP007
    text: str | None = None
    size: Literal["small", "large", 12] = "small"
    color: Color = Color.RED
    shade: Color | None = None
    tags: list[str] = dataclasses.field(default_factory=list)
    numbers: list[int] | None = None
    colors: list[Color] = dataclasses.field(default_factory=list)
    anything: int | str = 1
    path: Path | None = None
    log_level: str = dataclasses.field(default="info", metadata={"choices": ["info", "debug"]})
    computed: int = dataclasses.field(default=9, init=False)


@dataclasses.dataclass
class Second:
    second_value: int = HfArg(default=4, aliases="-s", help="Second.")


BOTH_READ = [
    "-n x --count 4 --rate 1e-3 --nam x --cou 4",
    "--name x --loud --no_keep --maybe 0 --no-surely",
    "--name x --loud=1 --size 12 --color blue --shade 7",
    "--name x --tags a --tags b c --numbers 1 2 3 --colors red blue",
    "--name x --anything 5 --text 5 --path a/b --log-level info -s 5",
]
BOTH_REFUSE = ["", "--name x --count 1.5", "--name x --loud perhaps", "--name x --color green", "--name x --l 3"]


def parse(parser_class: Any, line: str) -> Any:
    return parser_class((Everything, Second), prog="x").parse_args_into_dataclasses(line.split())


@pytest.mark.parametrize("line", BOTH_READ)
def test_command_lines_are_parsed_as_in_transformers(line: str) -> None:
    assert parse(HfArgumentParser, line) == parse(transformers.HfArgumentParser, line)


@pytest.mark.parametrize("line", BOTH_REFUSE)
def test_an_error_of_transformers_parser_ends_with_status_2_and_a_single_line(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)):
        parse(transformers.HfArgumentParser, line)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        parse(HfArgumentParser, line)
    assert ended.value.code == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("x: error: ")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            ["--learning_rte=1", "--zzqq"],
            "--learning_rte: did you mean '--learning_rate'?",
        ),
        (["--fp16", "--bf16"], "x: error: fp16 and bf16 are both set; choose one of them."),
        (["--save_safetensors", "false"], "save_safetensors=False is no longer possible"),
    ],
)
def test_an_error_ends_the_program_with_a_single_line(
    capsys: pytest.CaptureFixture[str], line: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        HfArgumentParser(TrainingArguments, prog="x").parse_args_into_dataclasses(line)
    (message,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and expected in message


def test_further_options_are_returned_in_a_namespace_and_unknown_texts_on_request() -> None:
    for parser_class in (HfArgumentParser, transformers.HfArgumentParser):
        parser = parser_class(Second)
        parser.add_argument("--dry", action="store_true")
        line = ["--dry", "--second_value", "8", "rest", "--other", "3"]
        result = parser.parse_args_into_dataclasses(line, return_remaining_strings=True)
        assert result == (Second(8), argparse.Namespace(dry=True), ["rest", "--other", "3"])


@pytest.mark.parametrize("parser_class", [HfArgumentParser, transformers.HfArgumentParser])
def test_options_are_read_from_files_and_the_command_line_overrides_them(
    parser_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.args").write_text("--count 10 --rate\n0.1", encoding="utf-8")
    (tmp_path / "more.txt").write_text("--count 20 --loud", encoding="utf-8")
    (tmp_path / "last.txt").write_text("--count 30", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py"), "--name", "x"])
    parser = parser_class(Everything)

    def parse_values(**options: Any) -> tuple[int, float, bool]:
        (values,) = parser.parse_args_into_dataclasses(**options)
        return values.count, values.rate, values.loud

    assert parse_values() == (10, 0.1, False)
    assert parse_values(look_for_args_file=False) == (3, 0.5, False)
    assert parse_values(args=["--name", "x", "--count", "1"]) == (1, 0.1, False)
    assert parse_values(args_filename=tmp_path / "more.txt") == (20, 0.5, True)
    files = ["--file", str(tmp_path / "more.txt"), "--file", str(tmp_path / "last.txt")]
    assert parse_values(args=["--name", "x", *files], args_file_flag="--file") == (30, 0.1, True)


# ---- Earlier names --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--no_cuda", "use_cpu", True),
        ("--no_cuda false", "use_cpu", False),
        ("--per_gpu_train_batch_size 3", "per_device_train_batch_size", 3),
        ("--overwrite_output_dir", "overwrite_output_dir", True),
        ("--include_inputs_for_metrics --include_for_metrics loss", "include_for_metrics", ["loss", "inputs"]),
        ("--optim adamw_hf", "optim", "adamw_torch"),
    ],
)
def test_earlier_spellings_are_options_too(line: str, name: str, value: Any) -> None:
    _, args = HfArgumentParser((Second, TrainingArguments)).parse_args_into_dataclasses(line.split())
    assert getattr(args, name) == value


def test_options_and_fields_of_a_script_take_precedence_over_earlier_names() -> None:
    @dataclasses.dataclass
    class ScriptArguments:
        overwrite_output_dir: bool = False
        past_index: int = 5

    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.add_argument("--no_cuda", action="store_true")
    script, args, rest = parser.parse_args_into_dataclasses(
        ["--overwrite_output_dir", "--past_index", "3", "--no_cuda"]
    )
    assert script == ScriptArguments(True, 3)
    assert (args.use_cpu, rest) == (False, argparse.Namespace(no_cuda=True))


def test_earlier_names_do_not_make_abbreviations_ambiguous() -> None:
    parser = HfArgumentParser(TrainingArguments)
    assert parser.parse_args(["--learning", "0.5"]).learning_rate == 0.5
    assert parser.parse_args(["--fp16_", "true"]).fp16_full_eval is True
    for text, value in (("non_padding", "non_padding"), ("true", True), ("no", False), ("", True)):
        namespace = parser.parse_args(["--include_num_input_tokens_seen", *filter(None, [text])])
        assert namespace.include_num_input_tokens_seen == value


# ---- Dicts and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser_class", [HfArgumentParser, transformers.HfArgumentParser])
def test_a_dict_a_json_file_and_a_yaml_file_fill_the_dataclasses(parser_class: Any, tmp_path: Path) -> None:
    values = {"name": "x", "count": 5, "tags": ["a", "b"], "second_value": 6}
    (tmp_path / "a.json").write_text(json.dumps(values), encoding="utf-8")
    (tmp_path / "a.yaml").write_text("name: x\ncount: 5\ntags: [a, b]\nsecond_value: 6\n", encoding="utf-8")
    parser = parser_class((Everything, Second))
    expected = (Everything("x", count=5, tags=["a", "b"]), Second(6))
    assert parser.parse_dict(values) == expected
    assert parser.parse_json_file(tmp_path / "a.json") == expected
    assert parser.parse_yaml_file(str(tmp_path / "a.yaml")) == expected
    assert parser.parse_dict({**values, "other": 1}, allow_extra_keys=True) == expected
    with pytest.raises(ValueError, match="other"):
        parser.parse_dict({**values, "other": 1})
    assert parser_class(Second).parse_args_into_dataclasses([]) == (Second(),)
    assert parser_class().parse_args_into_dataclasses([]) == ()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_dicts_and_files_accept_earlier_names(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("evaluation_strategy: epoch\nno_cuda: true\n", encoding="utf-8")
    (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(tmp_path / "a.yaml")
    assert (args.eval_strategy, args.use_cpu) == ("epoch", True)
    (tmp_path / "a.json").write_text('{"learning_rte": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match="'learning_rte': did you mean 'learning_rate'"):
        HfArgumentParser(TrainingArguments).parse_json_file(tmp_path / "a.json")


REDIRECTED = """
import json, sys
import littrainer.auto
import littrainer
from transformers import HfArgumentParser, TrainingArguments, hf_argparser
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--evaluation_strategy", "epoch"])
facts = {"earlier": [args.eval_strategy, HfArgumentParser is littrainer.HfArgumentParser]}
base = HfArgumentParser.__base__.__module__
facts["is transformers'"] = hf_argparser.HfArg is littrainer.HfArg and base == "transformers.hf_argparser"
for name in [name for name in sys.modules if name.startswith(("transformers", "littrainer.arguments.parser"))]:
    del sys.modules[name]
sys.modules["transformers"] = None
try:
    import littrainer.arguments.parser
except ImportError as error:
    facts["missing"] = "pip install transformers" in str(error)
print(json.dumps(facts))
"""


@dataclasses.dataclass
class DerivedArguments(TrainingArguments):
    further: int = 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("evaluation_strategy", "epoch"), ("warmup_ratio", 0.1), ("optim", "adamw_hf"), ("no_cuda", True)],
)
def test_the_warning_about_an_earlier_spelling_points_to_the_script(option: str, value: Any, tmp_path: Path) -> None:
    parser, file = HfArgumentParser(DerivedArguments), tmp_path / "a.json"
    file.write_text(json.dumps({"output_dir": "out", option: value}), encoding="utf-8")
    with pytest.warns(FutureWarning, match="earlier spelling") as record:
        parser.parse_args_into_dataclasses(["--output_dir", "out", f"--{option}", str(value)])
        parser.parse_dict({"output_dir": "out", option: value})
        parser.parse_json_file(file)
    assert [warning.filename for warning in record] == [__file__] * 3
    assert [warning.lineno - record[0].lineno for warning in record] == [0, 1, 2]


def test_the_help_page_has_each_option_and_no_earlier_name() -> None:
    page = HfArgumentParser(TrainingArguments).format_help()
    assert all(f"--{field.name}" in page for field in dataclasses.fields(TrainingArguments))
    assert "evaluation_strategy" not in page


def test_the_parser_extends_transformers_under_the_redirection_and_needs_transformers(
    tmp_path: Path,
) -> None:
    facts = facts_of(REDIRECTED, tmp_path)
    assert facts == {"earlier": ["epoch", True], "is transformers'": True, "missing": True}
