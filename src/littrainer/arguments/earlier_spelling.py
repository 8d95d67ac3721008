"""Construction and attributes of argument classes under the names that earlier transformers releases had."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from littrainer.arguments.earlier_names import EARLIER_NAMES, EarlierName
from littrainer.arguments.script_line import stacklevel_of_script
from littrainer.arguments.unknown_names import RefusesUnknownNames
from littrainer.errors.tracebacks import ShortTraceback


def earlier_names_of(cls: type, names: Any) -> list[str]:
    """Those of `names` that mean something to a class under an earlier spelling, in the order of their table."""
    own: Any = cls.__dataclass_fields__  # type: ignore[attr-defined]
    return [name for name in EARLIER_NAMES if name in names and name not in own]


def translated(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with each earlier name replaced by what it means today; one FutureWarning for each tells the new name.

    Parameters:
        cls: the argument class that the keywords are for.
        given: keywords under any mixture of names.

    Raises:
        ValueError: names what asks for something that is gone, or contradicts a keyword that is given besides.
    """
    names = earlier_names_of(cls, given)
    today = {name: value for name, value in given.items() if name not in names}
    errors = []
    for name in names:
        rule, value = EARLIER_NAMES[name], given[name]
        try:
            found = _meaning(rule, name, value, functools.partial(_current, cls, today))
            _check_agreement(cls, rule, name, value, found, today)
        except ValueError as error:
            errors.append(str(error))
            continue
        today.update(found)
        warnings.warn(_told(rule, name, value, found), FutureWarning, stacklevel=stacklevel_of_script())
    if errors:
        raise ValueError(f"{cls.__name__}: {'; '.join(errors)}.")
    return today


def _meaning(rule: EarlierName, name: str, value: Any, current: Callable[[str], Any]) -> dict[str, Any]:
    if rule.asks_for_nothing(value):
        return {}
    if rule.meaning is None:
        raise ValueError(f"{_shown(name, value)} is no longer possible: {rule.advice}")
    return rule.meaning(value, current)


def _current(cls: type, today: Mapping[str, Any], name: str) -> Any:
    return today[name] if name in today else _default(cls, name)


def _default(cls: type, name: str) -> Any:
    field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _check_agreement(
    cls: type, rule: EarlierName, name: str, value: Any, found: Mapping[str, Any], today: Mapping[str, Any]
) -> None:
    # Command-line parsers give every argument, so one that is at its default may not have been meant.
    for new, meant in found.items():
        besides = _current(cls, today, new)
        if not rule.extends and besides not in (meant, _default(cls, new)):
            raise ValueError(f"{_shown(name, value)} contradicts {_shown(new, besides)}; {rule.advice} alone")


def _told(rule: EarlierName, name: str, value: Any, found: Mapping[str, Any]) -> str:
    if not found:
        advice = rule.advice if rule.harmless else "leave it out"
        return f"{_shown(name, value)} changes nothing and {name} is no longer an argument: {advice}."
    meant = ", ".join(_shown(new, meant) for new, meant in found.items())
    return f"{_shown(name, value)} is an earlier spelling: write {meant}."


def _shown(name: str, value: Any) -> str:
    return name if name.endswith("_token") else f"{name}={getattr(value, 'value', value)!r}"


class EarlierAttribute:
    """Answers one earlier name as an attribute: scripts read and set fields of the arguments they parsed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, args: Any, owner: type) -> Any:
        # A dataclass would take what the class answers here for the default of a subclass's field.
        if args is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")
        if self.name in vars(args):
            return vars(args)[self.name]
        if self._is_field_of(args):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}")
        rule = EARLIER_NAMES[self.name]
        return rule.idle[0] if rule.read is None else rule.read(args)

    def __set__(self, args: Any, value: Any) -> None:
        rule = EARLIER_NAMES[self.name]
        if self._is_field_of(args):
            vars(args)[self.name] = value
            return
        found = _meaning(rule, self.name, value, functools.partial(getattr, args))
        if not found and rule.read is not None and rule.kind is bool and rule.read(args) and rule.replaced_by:
            found = {rule.replaced_by: _default(type(args), rule.replaced_by)}
        warnings.warn(_told(rule, self.name, value, found), FutureWarning, stacklevel=stacklevel_of_script())
        for name, meant in found.items():
            setattr(args, name, meant)
        if rule.read is None:
            vars(args)[self.name] = value

    def _is_field_of(self, args: Any) -> bool:
        return self.name in type(args).__dataclass_fields__


class UnderstandsEarlierNames(RefusesUnknownNames):
    """Base of argument classes whose constructors and attributes take earlier names too.

    A subclass's dataclass decorator generates a constructor that calls no other one, after the class was made. So the
    constructors are prepared where each instance passes first, in `__new__`. One that takes `**kwargs` is left alone:
    it does its own sorting, and hands on what it does not know.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            for owner in cls.__mro__:
                if issubclass(owner, UnderstandsEarlierNames) and dataclasses.is_dataclass(owner):
                    _prepare_constructor(owner)
        return super().__new__(cls, *args, **kwargs)


for _name in EARLIER_NAMES:
    setattr(UnderstandsEarlierNames, _name, EarlierAttribute(_name))


def _prepare_constructor(owner: type) -> None:
    constructor = vars(owner).get("__init__")
    if constructor is None or hasattr(constructor, "takes_earlier_names"):
        return
    parameters = inspect.signature(constructor).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        names = [name for name in earlier_names_of(type(self), kwargs) if name not in parameters]
        with ShortTraceback():
            if names:
                # The folder, which a name on the Hub may follow from, usually comes first and without its name.
                positional = dict(zip(list(parameters)[1:], args, strict=False))
                constructor(self, **translated(type(self), {**positional, **kwargs}))
            else:
                constructor(self, *args, **kwargs)
        for name in names:
            if EARLIER_NAMES[name].read is None:
                vars(self)[name] = kwargs[name]

    __init__.takes_earlier_names = True  # type: ignore[attr-defined]
    owner.__init__ = __init__  # type: ignore[misc]
