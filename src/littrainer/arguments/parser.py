"""`HfArgumentParser`: dataclasses filled from a command line, a dict, a JSON file or a YAML file."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from littrainer.arguments.did_you_mean import suggestion
from littrainer.arguments.earlier_names import EARLIER_NAMES, UnderstandsEarlierNames, earlier_names_of
from littrainer.arguments.fields import default_of, topics_of
from littrainer.arguments.json_values import parse_json_object


def HfArg(
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A dataclass field with what a command-line parser needs.

    Parameters:
        aliases: further option strings, such as `-e`.
        help: what the argument does.
        default, default_factory: as in `dataclasses.field`; without either the option is required.
        metadata: further metadata.
        kwargs: further keywords of `dataclasses.field`.

    Returns:
        the field, for the body of a dataclass.
    """
    described = dict(metadata or {})
    described.update({key: value for key, value in (("aliases", aliases), ("help", help)) if value is not None})
    return dataclasses.field(default=default, default_factory=default_factory, metadata=described, **kwargs)


class HfArgumentParser(argparse.ArgumentParser):
    """Makes options of the fields of dataclasses, and dataclass instances of what is given.

    A field `save_steps` becomes `--save_steps` and `--save-steps`; a truth value takes `--flag` alone or with a word,
    and one that is true by default also `--no_flag`. What is wrong on a command line ends the program with exit status
    2 and one line.

    Parameters:
        dataclass_types: a dataclass or several.
        kwargs: keywords of `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", OneLineHelpFormatter)
        super().__init__(**kwargs)
        if dataclass_types is None:
            dataclass_types = []
        elif isinstance(dataclass_types, type) or not isinstance(dataclass_types, Iterable):
            dataclass_types = [dataclass_types]
        self.dataclass_types: list[type] = list(dataclass_types)
        # Those that became options; None until the first command line is parsed.
        self._earlier_options: list[str] | None = None
        for dataclass_type in self.dataclass_types:
            self._add_dataclass_arguments(dataclass_type)

    # ---- Options ----------------------------------------------------------------------------------------------------

    def _add_dataclass_arguments(self, dataclass_type: type) -> None:
        try:
            hints = typing.get_type_hints(dataclass_type)
        except NameError as error:
            raise RuntimeError(
                f"{dataclass_type.__name__}: its annotations cannot be resolved ({error}); define the types it names "
                "at the top level of a module, or drop `from __future__ import annotations` there."
            ) from error
        for title, description, fields in sections_of(dataclass_type):
            group = self.add_argument_group(title, description)
            for field in fields:
                self._add_field(group, field, hints[field.name])

    @staticmethod
    def _add_field(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
        aliases = field.metadata.get("aliases", [])
        aliases = [aliases] if isinstance(aliases, str) else aliases
        keywords = argparse_keywords(field, hint)
        group.add_argument(*_spellings(field.name), *aliases, **keywords)
        if field.default is True and kind_of(hint, field.name).read is truth:
            group.add_argument(
                *_spellings(f"no_{field.name}"),
                action="store_false",
                dest=field.name,
                default=argparse.SUPPRESS,
                help=f"The opposite of --{field.name}.",
            )

    def _add_earlier_names(self) -> None:
        # Only now, so that a script's own options of the same name come first; and only once.
        if self._earlier_options is not None:
            return
        self._earlier_options = []
        if not any(issubclass(cls, UnderstandsEarlierNames) for cls in self.dataclass_types):
            return
        for name, rule in EARLIER_NAMES.items():
            spellings = [text for text in _spellings(name) if text not in self._option_string_actions]
            if spellings and f"--{name}" in spellings:
                keywords: dict[str, Any] = {"type": rule.kind}
                if rule.kind is bool:
                    keywords = {"type": truth, "nargs": "?", "const": True}
                self._earlier_options.append(name)
                self.add_argument(*spellings, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **keywords)

    def _get_option_tuples(self, option_string: str) -> Any:
        # The two spellings of one option do not make an abbreviation ambiguous, and neither do earlier names.
        found = {id(match[0]): match for match in reversed(super()._get_option_tuples(option_string))}
        matches = list(reversed(found.values()))
        return [match for match in matches if match[0].help is not argparse.SUPPRESS] or matches

    # ---- Command line -----------------------------------------------------------------------------------------------

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
            look_for_args_file: read options from a file beside the program that has its name and the ending `.args`.
            args_filename: read options from this file instead.
            args_file_flag: option that names a file to read options from; it may be given several times.

        Options of the command line decide over those of files, and later files over earlier ones.

        Returns:
            the instances in the order of the dataclasses; a namespace of further options, if the parser has any; the
            list of remaining texts, if asked for.

        Raises:
            SystemExit: an option is unknown, or a value cannot be right.
            FileNotFoundError: there is no file `args_filename`.
        """
        texts = self._with_files(args, look_for_args_file, args_filename, args_file_flag)
        namespace, remaining = self.parse_known_args(texts)
        given = vars(namespace)
        filled = [self._fill(cls, given) for cls in self.dataclass_types]
        if given:
            filled.append(namespace)
        if return_remaining_strings:
            return (*filled, remaining)
        if remaining:
            self._refuse(remaining)
        return tuple(filled)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, with the names of earlier transformers releases understood.

        Parameters:
            args: the command line's texts; by default those of the process.
            namespace: an object to fill.

        Returns:
            the namespace, and the texts that no option took.
        """
        self._add_earlier_names()
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse; an unknown option is refused with the nearest known one.

        Parameters:
            args: the command line's texts; by default those of the process.
            namespace: an object to fill.

        Returns:
            the namespace.

        Raises:
            SystemExit: an option is not known, missing or wrong; the status is 2.
        """
        found, remaining = self.parse_known_args(args, namespace)
        if remaining:
            self._refuse(remaining)
        return found

    def error(self, message: str) -> typing.NoReturn:
        """End the program with exit status 2 and one line.

        Parameters:
            message: what was wrong.

        Raises:
            SystemExit: always.
        """
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def _fill(self, cls: type, given: dict[str, Any]) -> Any:
        names = _names_of(cls, self._earlier_options or [])
        values = {name: given.pop(name) for name in names if name in given}
        if not issubclass(cls, UnderstandsEarlierNames):
            return cls(**values)
        try:
            return cls(**values)
        except (ValueError, NotImplementedError) as error:
            self.error(str(error))

    def _refuse(self, remaining: Sequence[str]) -> typing.NoReturn:
        known = [text for text in self._option_string_actions if text.startswith("--")]
        names = [text.partition("=")[0] for text in remaining if text.startswith("--")]
        hints = [f"{name}: {suggestion(name, known)}" for name in names]
        self.error("; ".join([f"unrecognized arguments: {' '.join(remaining)}", *hints]))

    def _with_files(
        self,
        args: Sequence[str] | None,
        look_beside_program: bool,
        filename: str | os.PathLike[str] | None,
        flag: str | None,
    ) -> list[str]:
        texts = list(sys.argv[1:] if args is None else args)
        files: list[Path] = []
        if filename is not None:
            files.append(Path(filename))
        elif look_beside_program and sys.argv and (beside := Path(sys.argv[0])).name:
            beside = beside.with_suffix(".args")
            files += [beside] if beside.is_file() else []
        if flag is not None:
            finder = argparse.ArgumentParser(prog=self.prog, add_help=False, allow_abbrev=False)
            finder.add_argument(flag, action="append", dest="files", default=[])
            found, texts = finder.parse_known_args(texts)
            for name in found.files:
                if not Path(name).is_file():
                    self.error(f"{flag} {name}: there is no such file")
            files += [Path(name) for name in found.files]
        return [text for file in files for text in file.read_text(encoding="utf-8").split()] + texts

    # ---- Dicts and files --------------------------------------------------------------------------------------------

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Fill the dataclasses from a dict.

        Parameters:
            args: field names and values.
            allow_extra_keys: leave out keys that no dataclass takes instead of refusing them.

        Returns:
            the instances in the order of the dataclasses.

        Raises:
            ValueError: a key belongs to no dataclass, or a value cannot be right.
        """
        return self._from_mapping(args, allow_extra_keys, "the dict")

    def parse_json_file(self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Fill the dataclasses from a JSON file.

        Parameters:
            json_file: its path.
            allow_extra_keys: as in `parse_dict`.

        Returns:
            the instances in the order of the dataclasses.

        Raises:
            ValueError: the file holds no JSON object, or as in `parse_dict`.
            OSError: the file cannot be read.
        """
        try:
            values = json.loads(Path(json_file).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{json_file} is not JSON: {error}.") from error
        return self._from_mapping(values, allow_extra_keys, os.fspath(json_file))

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Fill the dataclasses from a YAML file.

        A number such as 5e-5, which YAML 1.1 takes for text, is read as a number where the field holds one.

        Parameters:
            yaml_file: its path.
            allow_extra_keys: as in `parse_dict`.

        Returns:
            the instances in the order of the dataclasses.

        Raises:
            ValueError: the file is not YAML, holds no mapping, or as in `parse_dict`.
            OSError: the file cannot be read.
            ImportError: PyYAML is not installed.
        """
        try:
            import yaml
        except ImportError as error:
            raise ImportError("parse_yaml_file needs PyYAML: pip install pyyaml.") from error
        try:
            values = yaml.safe_load(Path(yaml_file).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{yaml_file} is not YAML: {' '.join(str(error).split())}.") from error
        if isinstance(values, dict):
            values = {key: self._number_if_field_holds_one(key, value) for key, value in values.items()}
        return self._from_mapping(values, allow_extra_keys, os.fspath(yaml_file))

    def _number_if_field_holds_one(self, name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        for cls in self.dataclass_types:
            if name in (field.name for field in dataclasses.fields(cls)):
                hint = typing.get_type_hints(cls)[name]
                members = typing.get_args(hint) or (hint,)
                if float in members and str not in members:
                    try:
                        return float(value)
                    except ValueError:
                        return value
        return value

    def _from_mapping(self, values: Any, allow_extra_keys: bool, source: str) -> tuple[Any, ...]:
        if not isinstance(values, Mapping):
            raise ValueError(f"{source} has to map argument names to values; it holds a {type(values).__name__}.")
        known: list[str] = []
        filled = []
        for cls in self.dataclass_types:
            names = _names_of(cls, values)
            known += names
            filled.append((cls, {name: values[name] for name in names if name in values}))
        extra = [] if allow_extra_keys else [key for key in values if key not in known]
        if extra:
            hints = "; ".join(f"{key!r}: {suggestion(str(key), known)}" for key in extra)
            raise ValueError(f"{source} has keys that no argument takes: {hints}")
        return tuple(cls(**own) for cls, own in filled)


def _names_of(cls: type, given: Any) -> list[str]:
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return names + (earlier_names_of(cls, given) if issubclass(cls, UnderstandsEarlierNames) else [])


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


# ---- How a field is read ---------------------------------------------------------------------------------------------

TRUE_WORDS = ("yes", "true", "t", "y", "1")
FALSE_WORDS = ("no", "false", "f", "n", "0")
# What a field's metadata may hand on to argparse; it may hold metadata of other libraries too.
PARSER_OPTIONS = ("action", "choices", "const", "help", "metavar", "nargs", "required")


class Kind(NamedTuple):
    """What a field takes.

    Parameters:
        read: makes a value of one text.
        choices: all valid values, None if there is no fixed set.
        several: the option takes one or more texts.
        one_or_several: of a single text the value itself is kept instead of a list of one.
    """

    read: Callable[[str], Any]
    choices: tuple[Any, ...] | None = None
    several: bool = False
    one_or_several: bool = False


def truth(text: str) -> bool:
    """Return the truth value that a word stands for."""
    if isinstance(text, bool):
        return text
    if text.lower() in (*TRUE_WORDS, *FALSE_WORDS):
        return text.lower() in TRUE_WORDS
    raise argparse.ArgumentTypeError(f"{text!r} is neither true (yes, y, t, 1) nor false (no, n, f, 0)")


def truth_or_text(text: str) -> bool | str:
    """Return a truth value for the words of one, else the text."""
    return truth(text) if text.lower() in (*TRUE_WORDS, *FALSE_WORDS) else text


def json_object(text: str) -> dict[str, Any]:
    """Return the dict that a JSON text stands for."""
    try:
        return parse_json_object(text, "the value")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Function that reads a value -> what the help page shows in its place.
METAVARS: dict[Any, str] = {truth: "BOOL", truth_or_text: "TEXT", int: "INT", float: "FLOAT", json_object: "JSON"}


def kind_of(hint: Any, field_name: str) -> Kind:
    """Return what a field with this type hint takes.

    Raises:
        TypeError: the hint says nothing that a text could be read as.
    """
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = [member for member in members if member is not types.NoneType]
    if len(plain) == 1:
        return _kind_of_one(plain[0], field_name)
    if str not in plain:
        return Kind(_first_that_fits([_kind_of_one(member, field_name).read for member in plain], plain))
    if bool in plain:
        return Kind(truth_or_text)
    # Which member a union with text is read as follows transformers: with None among them the second, else not text.
    others = [member for member in plain if member is not str]
    if types.NoneType not in members:
        return _kind_of_one(others[0], field_name)
    chosen = members[0] if members[1] is types.NoneType else members[1]
    if chosen is str and any(typing.get_origin(member) is list for member in others):
        return Kind(str, several=True, one_or_several=True)
    return Kind(str) if (typing.get_origin(chosen) or chosen) is dict else _kind_of_one(chosen, field_name)


def _kind_of_one(hint: Any, field_name: str) -> Kind:
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        return _choice(typing.get_args(hint))
    if isinstance(origin, type) and issubclass(origin, Enum):
        return _choice([member.value for member in origin], origin)
    if isinstance(origin, type) and issubclass(origin, list):
        items = _kind_of_one((typing.get_args(hint) or (str,))[0], field_name)
        return Kind(items.read, items.choices, several=True)
    readers: dict[Any, Callable[[str], Any]] = {bool: truth, "bool": truth, dict: json_object, Any: str}
    if origin not in readers and not callable(origin):
        raise TypeError(
            f"field {field_name!r}: a command line cannot give a {hint!r}; use text, a number, bool, an Enum, a "
            "Literal, or a list or dict of them, or declare the field with init=False."
        )
    return Kind(readers.get(origin, origin))


def _choice(values: Sequence[Any], enumeration: type[Enum] | None = None) -> Kind:
    by_text = {str(value): value for value in values}

    def value(text: str) -> Any:
        if text in by_text or enumeration is None:
            return by_text.get(text, text)
        try:
            # An enumeration may know further spellings.
            return enumeration(text).value
        except ValueError:
            return text

    return Kind(value, tuple(values))


def _first_that_fits(readers: Sequence[Callable[[str], Any]], hints: Sequence[Any]) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        for read in readers:
            with contextlib.suppress(ValueError, TypeError, argparse.ArgumentTypeError):
                return read(text)
        names = " or ".join(getattr(hint, "__name__", str(hint)) for hint in hints)
        raise argparse.ArgumentTypeError(f"{text!r} is no {names}")

    return value


class KeepOneAsItIs(argparse.Action):
    """Stores a single text as itself and several as a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store the value, as argparse wants it."""
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def argparse_keywords(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Return keywords of `ArgumentParser.add_argument` for a field.

    Parameters:
        field: the field; its metadata may hold help and other keywords of argparse.
        hint: its resolved type hint.

    Raises:
        TypeError: as `kind_of`.
    """
    kind = kind_of(hint, field.name)
    keywords = {name: value for name, value in field.metadata.items() if name in PARSER_OPTIONS}
    keywords["type"] = kind.read
    if kind.choices is not None:
        keywords["choices"] = kind.choices
    choices = list(keywords.get("choices", ()))
    if not choices:
        keywords.setdefault("metavar", METAVARS.get(kind.read, "TEXT"))
    elif len(choices) > MOST_CHOICES_IN_OPTION:
        keywords.setdefault("metavar", field.name.upper())
        keywords["help"] = f"{keywords.get('help', '')} One of {', '.join(map(str, choices))}.".strip()
    if kind.several:
        keywords["nargs"] = "+"
    if kind.one_or_several:
        keywords["action"] = KeepOneAsItIs
    default = default_of(field)
    if kind.read is truth:
        if default is dataclasses.MISSING and hint is bool:
            default = False
        if hint is bool or default not in (None, dataclasses.MISSING):
            keywords.update(nargs="?", const=True)
    if default is dataclasses.MISSING:
        keywords["required"] = True
        return keywords
    if default not in (None, "", []):
        keywords.setdefault("help", DEFAULT_ALONE)
    return {**keywords, "default": default}


# ---- The help page ---------------------------------------------------------------------------------------------------

MOST_OPTIONS_IN_USAGE = 12
MOST_CHOICES_IN_OPTION = 6
# The help of a field that describes nothing: argparse shows no default if there is no help.
DEFAULT_ALONE = "(default: %(default)s)"

Section = tuple[str, str | None, list[dataclasses.Field[Any]]]


def sections_of(cls: type) -> Iterator[Section]:
    """Yield headings, descriptions and fields of a dataclass that a command line can give.

    A class may name its heading in `_argument_group_name`. Training arguments have one for each topic.
    """
    left = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for topic in topics_of(cls):
        names = [field.name for field in dataclasses.fields(topic) if field.name in left]
        yield (topic.__doc__ or topic.__name__).rstrip("."), None, [left.pop(name) for name in names]
    if left:
        text = (cls.__doc__ or "").strip()
        # A dataclass without a docstring gets its signature for one.
        is_written = text and not text.startswith(f"{cls.__name__}(")
        description = text.splitlines()[0].replace("%", "%%") if is_written else None
        yield getattr(cls, "_argument_group_name", cls.__name__), description, list(left.values())


class OneLineHelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows an option in one spelling, with its value, its help and its default, if it has one."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Show in the usage line what has to be given, and that there are options, instead of all of them."""
        actions = list(actions)
        if usage is None and len(actions) > MOST_OPTIONS_IN_USAGE:
            needed = [one for one in actions if one.required and one.help is not argparse.SUPPRESS]
            texts = [" ".join([*one.option_strings[:1], self._value_of(one)]) for one in needed]
            usage = " ".join(["%(prog)s [options]", *(text.replace("%", "%%") for text in texts)])
        super().add_usage(usage, actions, groups, prefix)

    def _value_of(self, action: argparse.Action) -> str:
        return self._format_args(action, action.dest.upper() if action.option_strings else action.dest)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        # --save-steps only repeats --save_steps.
        shown: dict[str, str] = {}
        for text in action.option_strings:
            shown.setdefault(text.replace("-", "_"), text)
        return ", ".join(shown.values()) + ("" if action.nargs == 0 else " " + self._value_of(action))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = "" if action.help == DEFAULT_ALONE else action.help or ""
        if action.option_strings and action.default not in (None, argparse.SUPPRESS, [], "") and action.nargs != 0:
            default = action.default.value if isinstance(action.default, Enum) else action.default
            text = f"{text} (default: {default})".strip()
        try:
            # argparse fills in %(default)s and the like; a help that merely speaks of 10 % must not break the page.
            text % {**vars(action), "prog": ""}
        except (KeyError, TypeError, ValueError):
            return text.replace("%", "%%")
        return text
