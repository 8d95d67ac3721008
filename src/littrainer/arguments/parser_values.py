"""How one field of a dataclass is read from a command line: its type hint as keywords of argparse."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple, Union

TRUE_WORDS = ("yes", "true", "t", "y", "1")
FALSE_WORDS = ("no", "false", "f", "n", "0")

# What a field's metadata may hand on to argparse. Metadata of other libraries stands beside it.
PARSER_OPTIONS = ("action", "choices", "const", "help", "metavar", "nargs", "required")


class Kind(NamedTuple):
    """What a field takes.

    Parameters:
        read: makes a value of one text.
        choices: all valid values, None where there is no fixed set.
        several: the option takes one or more texts.
        one_or_several: of a single text the value itself is kept instead of a list of one.
    """

    read: Callable[[str], Any]
    choices: tuple[Any, ...] | None = None
    several: bool = False
    one_or_several: bool = False

    @property
    def is_truth(self) -> bool:
        """Whether the field holds true or false and nothing else."""
        return self.read is truth


def truth(text: str) -> bool:
    """The truth value that a word stands for."""
    if isinstance(text, bool):
        return text
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true (yes, y, t, 1) nor false (no, n, f, 0)")


def json_object(text: str) -> dict[str, Any]:
    """The dict that a JSON text stands for."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object such as {{"key": 1}}')
    return value


def truth_or_text(text: str) -> bool | str:
    """A truth value for the words of one, else the text."""
    try:
        return truth(text)
    except argparse.ArgumentTypeError:
        return text


# Function that reads a value -> what the help page shows in its place.
METAVARS: dict[Any, str] = {truth: "BOOL", truth_or_text: "TEXT", int: "INT", float: "FLOAT", json_object: "JSON"}


def kind_of(hint: Any, field_name: str) -> Kind:
    """What a field with this type hint takes.

    Raises:
        TypeError: the hint says nothing that a text could be read as.
    """
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = [member for member in members if member is not types.NoneType]
    if len(plain) == 1:
        return _kind_of_one(plain[0], field_name)
    if str not in plain:
        return Kind(_first_that_fits([_kind_of_one(member, field_name).read for member in plain], plain))
    # Which member a union with text is read as follows transformers: with None among them the second, else not text.
    others = [member for member in plain if member is not str]
    if bool in plain:
        return Kind(truth_or_text)
    if types.NoneType not in members:
        return _kind_of_one(others[0], field_name)
    chosen = members[0] if members[1] is types.NoneType else members[1]
    if chosen is str and any(typing.get_origin(member) is list for member in others):
        return Kind(str, several=True, one_or_several=True)
    return Kind(str) if _is_dict(chosen) else _kind_of_one(chosen, field_name)


def _kind_of_one(hint: Any, field_name: str) -> Kind:
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        return _choice(typing.get_args(hint))
    if isinstance(origin, type) and issubclass(origin, Enum):
        return _choice([member.value for member in origin], origin)
    if origin in (bool, "bool"):
        return Kind(truth)
    if isinstance(origin, type) and issubclass(origin, list):
        items = _kind_of_one((typing.get_args(hint) or (str,))[0], field_name)
        return Kind(items.read, items.choices, several=True)
    if _is_dict(hint):
        return Kind(json_object)
    if origin is Any:
        return Kind(str)
    if not callable(origin):
        raise TypeError(
            f"field {field_name!r}: a command line cannot give a {hint!r}; use text, a number, bool, an Enum, a "
            "Literal, or a list or dict of them, or declare the field with init=False."
        )
    return Kind(origin)


def _is_dict(hint: Any) -> bool:
    return (typing.get_origin(hint) or hint) is dict


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
            try:
                return read(text)
            except (ValueError, TypeError, argparse.ArgumentTypeError):
                continue
        names = " or ".join(getattr(hint, "__name__", str(hint)) for hint in hints)
        raise argparse.ArgumentTypeError(f"{text!r} is no {names}")

    return value


class KeepOneAsItIs(argparse.Action):
    """Stores a single text as itself and several as a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store the value, as argparse wants it."""
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def argparse_keywords(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Keywords of `ArgumentParser.add_argument` for a field.

    Parameters:
        field: the field; its metadata may hold help and other keywords of argparse.
        hint: its resolved type hint.

    Raises:
        TypeError: as `kind_of`.
    """
    kind = kind_of(hint, field.name)
    keywords = {name: value for name, value in field.metadata.items() if name in PARSER_OPTIONS}
    keywords["type"] = kind.read
    if kind.choices is None and "choices" not in keywords:
        keywords.setdefault("metavar", METAVARS.get(kind.read, "TEXT"))
    if kind.choices is not None:
        keywords["choices"] = kind.choices
    if kind.several:
        keywords["nargs"] = "+"
    if kind.one_or_several:
        keywords["action"] = KeepOneAsItIs
    default = _default(field)
    if kind.is_truth:
        is_optional = hint is not bool
        if default is dataclasses.MISSING and not is_optional:
            default = False
        if not is_optional or default not in (None, dataclasses.MISSING):
            keywords.update(nargs="?", const=True)
    if default is dataclasses.MISSING:
        keywords["required"] = True
    else:
        keywords["default"] = default
    return keywords


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
