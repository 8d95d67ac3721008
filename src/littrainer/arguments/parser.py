"""`HfArgumentParser`: dataclasses filled from a command line, a dict, a JSON file or a YAML file."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

from littrainer.arguments.did_you_mean import suggestion, unrecognized
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
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(**kwargs)
        is_one = dataclasses.is_dataclass(dataclass_types)
        self.dataclass_types: list[Any] = [dataclass_types] if is_one else list(dataclass_types or ())
        # The earlier names that became options; None until the first command line is parsed.
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
        left = {field.name: field for field in dataclasses.fields(dataclass_type) if field.init}
        for topic in topics_of(dataclass_type):
            group = self.add_argument_group((topic.__doc__ or "").rstrip("."))
            for field in dataclasses.fields(topic):
                if field.name in left:
                    self._add_field(group, left.pop(field.name), hints[field.name])
        title = getattr(dataclass_type, "_argument_group_name", None)
        place: Any = self if title is None else self.add_argument_group(title)
        for field in left.values():
            self._add_field(place, field, hints[field.name])

    @staticmethod
    def _add_field(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
        aliases = field.metadata.get("aliases", [])
        aliases = [aliases] if isinstance(aliases, str) else aliases
        keywords = argparse_keywords(field, hint)
        group.add_argument(*_spellings(field.name), *aliases, **keywords)
        if field.default is True and keywords["type"] is truth:
            group.add_argument(
                *_spellings(f"no_{field.name}"),
                action="store_false",
                dest=field.name,
                default=argparse.SUPPRESS,
                help=f"The opposite of --{field.name}.",
            )

    def _add_earlier_names(self) -> None:
        # At the first command line, since a script's own options of the same name come first.
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
            look_for_args_file: read options from the file of the program's name with the ending `.args`.
            args_filename: read options from this file instead.
            args_file_flag: option that names a file to read options from; it may be given several times.

        The command line decides over files, and later files over earlier ones.

        Returns:
            the instances in the order of the dataclasses; a namespace of further options, if the parser has any; the
            list of remaining texts, if asked for.

        Raises:
            SystemExit: an option is unknown, or a value cannot be right.
            FileNotFoundError: a file that is named does not exist.
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
        """
        self._add_earlier_names()
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse; an unknown option is refused with the nearest known one.

        Parameters:
            args: the command line's texts; by default those of the process.
            namespace: an object to fill.
        """
        found, remaining = self.parse_known_args(args, namespace)
        if remaining:
            self._refuse(remaining)
        return found

    def error(self, message: str) -> typing.NoReturn:
        """End the program with exit status 2 and one line.

        Parameters:
            message: what was wrong.
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
        self.error(unrecognized(remaining, [text for text in self._option_string_actions if text.startswith("--")]))

    def _with_files(
        self,
        args: Sequence[str] | None,
        look_beside_program: bool,
        filename: str | os.PathLike[str] | None,
        flag: str | None,
    ) -> list[str]:
        texts = list(sys.argv[1:] if args is None else args)
        files = [] if filename is None else [Path(filename)]
        if filename is None and look_beside_program and sys.argv and Path(sys.argv[0]).name:
            file = Path(sys.argv[0]).with_suffix(".args")
            files += [file] if file.is_file() else []
        if flag is not None:
            finder = argparse.ArgumentParser(prog=self.prog, add_help=False, allow_abbrev=False)
            finder.add_argument(flag, action="append", dest="files", default=[], type=Path)
            found, texts = finder.parse_known_args(texts)
            files += found.files
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
        source = os.fspath(json_file)
        values = parse_json_object(Path(json_file).read_text(encoding="utf-8"), source)
        return self._from_mapping(values, allow_extra_keys, source)

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Fill the dataclasses from a YAML file.

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
        return self._from_mapping(values, allow_extra_keys, os.fspath(yaml_file))

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

TRUTHS = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}
# What a field's metadata may hand on to argparse; it may hold metadata of other libraries too.
PARSER_OPTIONS = ("action", "choices", "const", "help", "metavar", "nargs", "required")


def truth(text: str) -> bool:
    if text.lower() not in TRUTHS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true (yes, y, t, 1) nor false (no, n, f, 0)")
    return TRUTHS[text.lower()]


def argparse_keywords(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Return keywords of `ArgumentParser.add_argument` for a field.

    Parameters:
        field: the field; its metadata may hold help and other keywords of argparse.
        hint: its resolved type hint.

    Raises:
        TypeError: the hint is a union of several types that are not text.
    """
    keywords = {name: value for name, value in field.metadata.items() if name in PARSER_OPTIONS}
    kind, default = _read_as(hint, field.name), default_of(field)
    origin = typing.get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, list):
        keywords.update(nargs="+", type=(typing.get_args(kind) or (str,))[0])
        # argparse reads a default that is text as an item of the list.
        default = None if default == "" else default
    elif origin is Literal:
        keywords.update(choices=typing.get_args(kind), type=_choice(typing.get_args(kind)))
    elif isinstance(kind, type) and issubclass(kind, Enum):
        values = [member.value for member in kind]
        keywords.update(choices=values, type=_choice(values, kind))
    else:
        keywords["type"] = {bool: truth, Any: str}.get(origin, origin)
    if kind is bool:
        if default is dataclasses.MISSING and hint is bool:
            default = False
        if hint is bool or default not in (None, dataclasses.MISSING):
            keywords.update(nargs="?", const=True)
    if default is dataclasses.MISSING:
        return {**keywords, "required": True}
    if default not in (None, "", []):
        # argparse shows no default if there is no help.
        keywords.setdefault("help", "(default: %(default)s)")
    return {**keywords, "default": default}


def _read_as(hint: Any, field_name: str) -> Any:
    """Return the one member of a union that a text is read as, chosen as in transformers."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = [member for member in members if member is not types.NoneType]
    if len(plain) == 1:
        return plain[0]
    if str not in plain:
        raise TypeError(f"field {field_name!r}: a command line cannot give a {hint!r}; use one type, or text too.")
    if bool in plain:
        return lambda text: TRUTHS.get(text.lower(), text)
    if types.NoneType not in members:
        return next(member for member in plain if member is not str)
    return members[0] if members[1] is types.NoneType else members[1]


def _choice(values: Sequence[Any], enumeration: type[Enum] | None = None) -> Any:
    by_text = {str(value): value for value in values}

    def value(text: str) -> Any:
        if text in by_text or enumeration is None:
            return by_text.get(text, text)
        try:
            # An enumeration may know further spellings.
            return enumeration(text).value
        except ValueError:
            return text

    return value
