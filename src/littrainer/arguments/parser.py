"""`HfArgumentParser`: transformers' parser, which takes earlier names too and suggests the nearest option.

Importing this module loads transformers, so functions import it when they parse.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
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


class HfArgumentParser(_Parser):
    """Parser that makes options of the fields of dataclasses, and dataclass instances of their values.

    As transformers' own, from which it derives. In addition it takes the names of earlier transformers releases, the
    further spellings of choices, text as well as a truth value for a field of `str | bool`, and a mistake on a command
    line ends the program with exit status 2 and one line that suggests the nearest option.

    Parameters:
        dataclass_types: a dataclass or several.
        kwargs: keywords of `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        self.dataclass_types: list[Any]
        # The earlier names that became options; None until the first command line is parsed.
        self._earlier_options: list[str] | None = None
        super().__init__(dataclass_types, **kwargs)

    @staticmethod
    def _parse_dataclass_field(parser: Any, field: dataclasses.Field[Any]) -> None:
        takes_text_or_truth = {bool, str} <= set(get_args(field.type))
        if takes_text_or_truth:
            field.type = str
        _Parser._parse_dataclass_field(parser, field)
        action = parser._option_string_actions[f"--{field.name}"]
        if takes_text_or_truth:
            action.nargs, action.const, action.type = "?", True, _read_truth_or_text
        elif isinstance(field.type, EnumMeta):
            action.type = _choice_reader(field.type)

    def _add_earlier_names(self) -> None:
        # Not in the constructor, since a script's own options of the same name take precedence.
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
        # The two spellings of one option do not make an abbreviation ambiguous, and neither do earlier names.
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
            args: the texts to parse; by default the command line of the program.
            return_remaining_strings: return what no option took instead of refusing it.
            look_for_args_file: read options from the file of the program's name with the ending `.args`.
            args_filename: read options from this file instead.
            args_file_flag: option that names a file to read options from; it may be given several times.

        The command line decides over files, and later files over earlier ones.

        Returns:
            the instances in the order of the dataclasses; a namespace of further options, if the parser has any; the
            list of remaining texts, if asked for.

        Raises:
            SystemExit: an option is unknown, or a value cannot be right.
        """
        self._add_earlier_names()
        dataclass_types, self.dataclass_types = self.dataclass_types, []
        try:
            # Without dataclasses transformers' method returns every value in a namespace, earlier names among them.
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
            self._refuse(remaining)
        return tuple(filled)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, with the names of earlier transformers releases understood.

        Parameters:
            args: the command line's texts; by default those of the process.
            namespace: an object to fill.
        """
        self._add_earlier_names()
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; an unknown option is refused with the nearest known option.

        Parameters:
            args: the command line's texts; by default those of the process.
            namespace: an object to fill.
        """
        result, remaining = self.parse_known_args(args, namespace)
        if remaining:
            self._refuse(remaining)
        return result

    def error(self, message: str) -> NoReturn:  # type: ignore[misc]
        """End the program with exit status 2 and one line.

        Parameters:
            message: the reason.
        """
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def _fill(self, cls: type, values: dict[str, Any]) -> Any:
        names = _names_of(cls, self._earlier_options or [])
        own = {name: values.pop(name) for name in names if name in values}
        if not issubclass(cls, AcceptsEarlierNames):
            return cls(**own)
        try:
            return cls(**own)
        except (ValueError, NotImplementedError) as error:
            self.error(str(error))

    def _refuse(self, remaining: Sequence[str]) -> NoReturn:
        self.error(unrecognized(remaining, [text for text in self._option_string_actions if text.startswith("--")]))

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Fill the dataclasses from a dict; `parse_json_file` and `parse_yaml_file` call it too.

        Parameters:
            args: field names and values.
            allow_extra_keys: leave out keys that no dataclass takes instead of refusing them.

        Returns:
            the instances in the order of the dataclasses.

        Raises:
            ValueError: a key belongs to no dataclass, or a value cannot be right.
        """
        if not isinstance(args, Mapping):
            raise ValueError(f"arguments have to map names to values; these are a {type(args).__name__}.")
        known = {cls: _names_of(cls, args) for cls in self.dataclass_types}
        names = [name for names in known.values() for name in names]
        extra = [] if allow_extra_keys else [key for key in args if key not in names]
        if extra:
            hints = "; ".join(f"{key!r}: {suggest_name(str(key), names)}" for key in extra)
            raise ValueError(f"no argument takes these keys: {hints}")
        return tuple(cls(**{name: args[name] for name in known[cls] if name in args}) for cls in self.dataclass_types)


def _names_of(cls: type, candidates: Any) -> list[str]:
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return names + (earlier_names_of(cls, candidates) if issubclass(cls, AcceptsEarlierNames) else [])


def _read_truth_or_text(text: str) -> bool | str:
    try:
        return bool(_original.string_to_bool(text))
    except argparse.ArgumentTypeError:
        return text


def _choice_reader(enumeration: Any) -> Any:
    values = {str(member.value): member.value for member in enumeration}

    def read(text: str) -> Any:
        if text in values:
            return values[text]
        try:
            # An enumeration may accept further spellings.
            return enumeration(text).value
        except ValueError:
            return text

    return read
