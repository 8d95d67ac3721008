"""`HfArgumentParser`: transformers' parser with earlier argument names and suggestions.

Importing this module loads transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from enum import EnumMeta
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from littrainer.arguments.did_you_mean import suggest_name, unrecognized
from littrainer.arguments.earlier_names import EARLIER_NAMES, AcceptsEarlierNames, earlier_names_of
from littrainer.redirection.shim import import_original


def _import_original() -> ModuleType:
    try:
        return import_original("transformers.hf_argparser")
    except ImportError as error:
        raise ImportError(
            f"HfArgumentParser extends the parser of transformers, which cannot be imported ({error}): "
            "pip install transformers."
        ) from error


if TYPE_CHECKING:
    from transformers import hf_argparser as _original
    from transformers.hf_argparser import HfArgumentParser as _Parser
else:
    _original = _import_original()
    _Parser = _original.HfArgumentParser


# Beginning of argparse's message.
UNRECOGNIZED = "unrecognized arguments: "


class HfArgumentParser(_Parser):
    """Parser whose options are the fields of dataclasses, and which returns instances of the dataclasses.

    In addition to transformers' parser it accepts earlier argument names and choices, and text for `str | bool`; an
    error ends the program with exit status 2 and a line with the nearest option.

    Parameters:
        dataclass_types: a dataclass or several.
        kwargs: keywords of `argparse.ArgumentParser`.

    Examples:
        >>> from littrainer import HfArgumentParser, TrainingArguments
        >>> parser = HfArgumentParser(TrainingArguments)
        >>> (args,) = parser.parse_args_into_dataclasses(["--output_dir", "runs/first", "--learning_rate", "3e-5"])
        >>> args.learning_rate
        3e-05
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        self.dataclass_types: list[Any]
        # Earlier names with an option; None until the first parsing.
        self._earlier_options: list[str] | None = None
        super().__init__(dataclass_types, **kwargs)

    @staticmethod
    def _parse_dataclass_field(parser: Any, field: dataclasses.Field[Any]) -> None:
        is_text_or_bool = {bool, str} <= set(get_args(field.type))
        if is_text_or_bool:
            field.type = str
        _Parser._parse_dataclass_field(parser, field)
        action = parser._option_string_actions[f"--{field.name}"]
        if is_text_or_bool:
            action.nargs, action.const, action.type = "?", True, _parse_text_or_bool
        elif isinstance(field.type, EnumMeta):
            action.type = _make_choice_parser(action.type, field.type)

    def _add_earlier_names(self) -> None:
        # Not in the constructor, since options of the script take precedence.
        if self._earlier_options is not None:
            return
        self._earlier_options = []
        if not any(issubclass(cls, AcceptsEarlierNames) for cls in self.dataclass_types):
            return
        for name, rule in EARLIER_NAMES.items():
            if f"--{name}" in self._option_string_actions:
                continue
            spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            keywords: dict[str, Any] = {"type": rule.kind}
            if rule.kind is bool:
                keywords = {"type": _original.string_to_bool, "nargs": "?", "const": True}
            self._earlier_options.append(name)
            self.add_argument(
                *(text for text in spellings if text not in self._option_string_actions),
                dest=name,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
                **keywords,
            )

    def _get_option_tuples(self, option_string: str) -> Any:
        # Spellings of the same option, and earlier names, are not ambiguous.
        matches = {id(match[0]): match for match in reversed(super()._get_option_tuples(option_string))}
        distinct = list(reversed(matches.values()))
        return [match for match in distinct if match[0].help is not argparse.SUPPRESS] or distinct

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | os.PathLike[str] | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Fill the dataclasses from a command line.

        Parameters:
            args: the texts to parse; by default the program's command line.
            return_remaining_strings: return unknown texts instead of raising SystemExit.
            look_for_args_file: read options from the program's file with the suffix `.args`.
            args_filename: read options from this file instead.
            args_file_flag: option, also repeated, that names a file of options.

        The command line overrides files, and later files override earlier files.

        Returns:
            the instances in the order of the dataclasses; a namespace of further options, if there are any; the unknown
            texts, if requested.

        Raises:
            SystemExit: an option is unknown, or a value is invalid.
        """
        self._add_earlier_names()
        dataclass_types, self.dataclass_types = self.dataclass_types, []
        try:
            # Without dataclasses all values are returned in a namespace.
            *namespaces, remaining = super().parse_args_into_dataclasses(
                args, True, look_for_args_file, args_filename, args_file_flag
            )
        finally:
            self.dataclass_types = dataclass_types
        values = vars(namespaces[0]) if namespaces else {}
        filled = [self._fill(cls, values) for cls in self.dataclass_types]
        if values:
            filled += namespaces
        if return_remaining_strings:
            return (*filled, remaining)
        if remaining:
            self.error(UNRECOGNIZED + " ".join(remaining))
        return tuple(filled)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, with earlier argument names.

        Parameters:
            args: the command line's texts; by default those of the process.
            namespace: an object to fill.
        """
        self._add_earlier_names()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:  # type: ignore[misc]
        """End the program with exit status 2 and a single line, which suggests the nearest option.

        Parameters:
            message: the reason.
        """
        unknown = message.partition(UNRECOGNIZED)[2].split()
        if unknown:
            message = unrecognized(unknown, [text for text in self._option_string_actions if text.startswith("--")])
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def _fill(self, cls: type, values: dict[str, Any]) -> Any:
        names = _list_names(cls, self._earlier_options or [])
        keywords = {name: values.pop(name) for name in names if name in values}
        if not issubclass(cls, AcceptsEarlierNames):
            return cls(**keywords)
        try:
            return cls(**keywords)
        except (ValueError, NotImplementedError) as error:
            self.error(str(error))

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Fill the dataclasses from a dict; `parse_json_file` and `parse_yaml_file` call it too.

        Parameters:
            args: field names and values.
            allow_extra_keys: skip unknown keys instead of raising ValueError.

        Returns:
            the instances in the order of the dataclasses.

        Raises:
            ValueError: a key is unknown, or a value is invalid.
        """
        names_by_class = {cls: _list_names(cls, args) for cls in self.dataclass_types}
        names = [name for names in names_by_class.values() for name in names]
        extra = [] if allow_extra_keys else [key for key in args if key not in names]
        if extra:
            hints = "; ".join(f"{key!r}: {suggest_name(str(key), names)}" for key in extra)
            raise ValueError(f"no argument takes these keys: {hints}")
        return tuple(
            cls(**{name: args[name] for name in names if name in args}) for cls, names in names_by_class.items()
        )


def _list_names(cls: type, candidates: Any) -> list[str]:
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return names + (earlier_names_of(cls, candidates) if issubclass(cls, AcceptsEarlierNames) else [])


def _parse_text_or_bool(text: str) -> bool | str:
    try:
        return bool(_original.string_to_bool(text))
    except argparse.ArgumentTypeError:
        return text


def _make_choice_parser(choose: Callable[[str], Any], enumeration: Any) -> Callable[[str], Any]:
    """Return a parser that accepts earlier spellings of a choice, too."""

    def parse(text: str) -> Any:
        value = choose(text)
        try:
            return enumeration(value).value
        except ValueError:
            return value

    return parse
