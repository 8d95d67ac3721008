"""Names and spellings that earlier transformers releases took: what each means today, and who understands them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.choices import get_script_stacklevel
from littrainer.arguments.did_you_mean import suggest_name
from littrainer.arguments.fields import get_default
from littrainer.arguments.json_values import read_mapping
from littrainer.runtime.tracebacks import ShortTraceback

# Values of a switch that ask for nothing.
_OFF = (False, None)
Current = Callable[[str], Any]
"""Function that takes the name of an argument and returns its value, or its default."""


@dataclass(frozen=True)
class EarlierName:
    """Rule for an argument of an earlier release.

    Parameters:
        advice: the end of the sentence "X is no longer an argument: ...", which says what to write instead.
        replaced_by: the argument that took over; without it every value but the `idle` ones is refused.
        idle: values that ask for nothing, the former default first.
        kind: type as which a command line reads the value.
        convert: takes a value and the current values, returns the value of today's argument.
        read: takes the value of today's argument, returns the earlier value.
        extends: the value adds to today's argument instead of contradicting it.
        harmless: no value ever changed the numbers of a run, so each may be dropped.
    """

    advice: str
    replaced_by: str | None = None
    idle: tuple[Any, ...] = (None,)
    kind: type = str
    convert: Callable[[Any, Current], Any] = lambda value, current: value
    read: Callable[[Any], Any] = lambda value: value
    extends: bool = False
    harmless: bool = False

    def asks_for_nothing(self, value: Any) -> bool:
        """Return whether a value leaves everything as it is."""
        return self.harmless or any(value == idle and type(value) is type(idle) for idle in self.idle)

    def translate(self, name: str, value: Any, current: Current) -> dict[str, Any]:
        """Return the arguments of today that a value sets; `name` is the earlier name, for the error."""
        if self.asks_for_nothing(value):
            return {}
        if self.replaced_by is None:
            raise ValueError(f"{_shown(name, value)} is no longer possible: {self.advice}")
        return {self.replaced_by: self.convert(value, current)}

    def read_from(self, args: Any) -> Any:
        """Return the value that a script finds under the earlier name."""
        return self.idle[0] if self.replaced_by is None else self.read(getattr(args, self.replaced_by))


def _renamed(name: str, kind: type = str) -> EarlierName:
    return EarlierName(f"use {name}", name, kind=kind)


def _entry(
    name: str, key: str, kind: type = bool, idle: tuple[Any, ...] = (None,), is_list: bool = False
) -> EarlierName:
    """Return the rule of a name that is an entry of a dict today, or is added to the list that is the entry."""

    def entries_of(config: Any) -> dict[str, Any]:
        return config.to_dict() if isinstance(config, AcceleratorConfig) else read_mapping(config or {}, name)

    def convert(value: Any, current: Current) -> dict[str, Any]:
        entries = entries_of(current(name))
        if is_list:
            present = entries.get(key) or []
            value = [*([present] if isinstance(present, str) else present), value]
        return {**entries, key: value}

    advice = f'use {name}={{"{key}": {"[...]" if is_list else "..."}}}'
    return EarlierName(
        advice, name, idle, kind, convert, lambda config: entries_of(config).get(key, idle[0]), extends=True
    )


def _switch(name: str, value: Any) -> EarlierName:
    advice = f"use {name}" if value is True else f'use {name}="{value}"'
    return EarlierName(advice, name, _OFF, bool, lambda *_: value, lambda present: present == value)


def _gone(advice: str, *idle: Any, kind: type = str) -> EarlierName:
    return EarlierName(advice, idle=(*idle, None), kind=kind)


def _add_inputs(_: Any, current: Current) -> list[str]:
    wanted = current("include_for_metrics") or []
    return list(dict.fromkeys([*([wanted] if isinstance(wanted, str) else wanted), "inputs"]))


def _count_tokens(_: Any, current: Current) -> Any:
    counted = current("include_num_input_tokens_seen")
    return "all" if counted in (False, None, "no") else counted


def _add_organization(organization: str, current: Current) -> str:
    folder = os.path.basename(os.path.normpath(current("output_dir") or "trainer_output"))
    return f"{organization}/{(current('hub_model_id') or folder).rpartition('/')[2]}"


_TORCH_PRECISION = "drop it, mixed precision always comes from torch"

EARLIER_NAMES: Mapping[str, EarlierName] = MappingProxyType(
    {
        # Spelled differently today.
        "evaluation_strategy": _renamed("eval_strategy"),
        "per_gpu_train_batch_size": _renamed("per_device_train_batch_size", int),
        "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size", int),
        "push_to_hub_token": _renamed("hub_token"),
        "torchdynamo": _renamed("torch_compile_backend"),
        "no_cuda": _switch("use_cpu", True),
        # A value of another argument today.
        "adafactor": _switch("optim", "adafactor"),
        "group_by_length": _switch("train_sampling_strategy", "group_by_length"),
        "include_inputs_for_metrics": EarlierName(
            'use include_for_metrics=["inputs"]',
            "include_for_metrics",
            _OFF,
            bool,
            _add_inputs,
            lambda wanted: "inputs" in (wanted or ()),
            extends=True,
        ),
        "include_tokens_per_second": EarlierName(
            "use include_num_input_tokens_seen",
            "include_num_input_tokens_seen",
            _OFF,
            bool,
            _count_tokens,
            lambda counted: counted != "no",
            extends=True,
        ),
        # The organisation is put in front of the name, so the name comes first.
        "push_to_hub_model_id": EarlierName('use hub_model_id="name" or "organisation/name"', "hub_model_id"),
        "push_to_hub_organization": EarlierName(
            'use hub_model_id="organisation/name"',
            "hub_model_id",
            convert=_add_organization,
            read=lambda name: (name or "").rpartition("/")[0] or None,
            extends=True,
        ),
        "fsdp_min_num_params": _entry("fsdp_config", "min_num_params", int, (0, None)),
        "fsdp_transformer_layer_cls_to_wrap": _entry("fsdp_config", "transformer_layer_cls_to_wrap", str, is_list=True),
        "dispatch_batches": _entry("accelerator_config", "dispatch_batches"),
        "split_batches": _entry("accelerator_config", "split_batches"),
        # Set through the environment today.
        "tpu_metrics_debug": _gone("drop it, nothing here runs on TPUs", False, kind=bool),
        "tpu_num_cores": _gone("set the environment variable TPU_NUM_CORES", kind=int),
        "ray_scope": _gone("set the environment variable RAY_SCOPE", "last"),
        # The feature is gone.
        "fp16_backend": _gone(_TORCH_PRECISION, "auto", "amp", "cuda_amp", "cpu_amp"),
        "half_precision_backend": _gone(_TORCH_PRECISION, "auto", "amp", "cuda_amp", "cpu_amp"),
        "jit_mode_eval": _gone("evaluation is not traced any more, use torch_compile=True", False, kind=bool),
        "save_safetensors": _gone("drop it, weights are always saved as safetensors", True, kind=bool),
        "past_index": _gone("drop it, there is no replacement", -1, kind=int),
        "use_legacy_prediction_loop": _gone("drop it, evaluation_loop does that work", False, kind=bool),
        "mp_parameters": _gone("drop it, there is no SageMaker model parallelism any more", ""),
        "_n_gpu": _gone("drop it, each process uses one GPU", -1, 0, 1, kind=int),
        # Nothing to set any more.
        "overwrite_output_dir": EarlierName(
            "drop it, an existing folder is never an error", None, (False,), bool, harmless=True
        ),
        "use_mps_device": EarlierName("drop it, an Apple GPU is found by itself", None, (False,), bool, harmless=True),
        "fp16_opt_level": EarlierName("drop it, it was for apex alone", None, ("O1",), harmless=True),
    }
)
"""Earlier name -> what it means, in the order in which the meanings are worked out."""


# ---- Construction and attributes -------------------------------------------------------------------------------------


def earlier_names_of(cls: type, names: Any) -> list[str]:
    """Return the earlier names among `names` that are no fields of a class, in the order of their table."""
    own: Any = cls.__dataclass_fields__  # type: ignore[attr-defined]
    return [name for name in EARLIER_NAMES if name in names and name not in own]


def translated(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords for a class with each earlier name replaced by what it means today; each is a FutureWarning."""
    names = earlier_names_of(cls, given)
    today = {name: value for name, value in given.items() if name not in names}
    errors = []
    for name in names:
        rule, value = EARLIER_NAMES[name], given[name]
        try:
            found = rule.translate(name, value, functools.partial(_current, cls, today))
            for new, meant in found.items():
                # Command-line parsers give every argument, so a default may not have been meant.
                present = _current(cls, today, new)
                if not rule.extends and present not in (meant, _default(cls, new)):
                    raise ValueError(f"{_shown(name, value)} contradicts {_shown(new, present)}; {rule.advice} alone")
        except ValueError as error:
            errors.append(str(error))
            continue
        today.update(found)
        warnings.warn(_told(rule, name, value, found), FutureWarning, stacklevel=get_script_stacklevel())
    if errors:
        raise ValueError(f"{cls.__name__}: {'; '.join(errors)}.")
    return today


def _current(cls: type, today: Mapping[str, Any], name: str) -> Any:
    return today[name] if name in today else _default(cls, name)


def _default(cls: type, name: str) -> Any:
    return get_default(cls.__dataclass_fields__[name])  # type: ignore[attr-defined]


def _told(rule: EarlierName, name: str, value: Any, found: Mapping[str, Any]) -> str:
    if not found:
        advice = rule.advice if rule.harmless else "leave it out"
        return f"{_shown(name, value)} changes nothing and {name} is no longer an argument: {advice}."
    meant = ", ".join(_shown(new, meant) for new, meant in found.items())
    return f"{_shown(name, value)} is an earlier spelling: write {meant}."


def _shown(name: str, value: Any) -> str:
    return name if name.endswith("_token") else f"{name}={getattr(value, 'value', value)!r}"


def apply_fields_with_earlier_names(args: Any) -> None:
    """Let fields with earlier names, which a script's own dataclass declares again, set today's arguments.

    Today's argument decides over the default of such a field, and another value of the field is refused.
    """
    cls = type(args)
    for name, field in cls.__dataclass_fields__.items():
        rule = EARLIER_NAMES.get(name)
        if rule is None or rule.asks_for_nothing(value := vars(args)[name]):
            continue
        found = rule.translate(name, value, functools.partial(getattr, args))
        found = {new: meant for new, meant in found.items() if getattr(args, new) != meant}
        given = [new for new in found if not rule.extends and getattr(args, new) != _default(cls, new)]
        if given and value != get_default(field):
            shown = _shown(given[0], getattr(args, given[0]))
            raise ValueError(f"{cls.__name__}: {_shown(name, value)} contradicts {shown}; {rule.advice} alone.")
        if found and not given:
            warnings.warn(_told(rule, name, value, found), FutureWarning, stacklevel=get_script_stacklevel())
            vars(args).update(found)


class EarlierAttribute:
    """An earlier name as an attribute: scripts read and set fields of the arguments they parsed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, args: Any, owner: type) -> Any:
        # A dataclass would read an answer of the class as the default of a subclass's field.
        if args is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")
        if self.name in vars(args):
            return vars(args)[self.name]
        if self._is_field_of(args):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}")
        return EARLIER_NAMES[self.name].read_from(args)

    def __set__(self, args: Any, value: Any) -> None:
        rule = EARLIER_NAMES[self.name]
        if self._is_field_of(args):
            vars(args)[self.name] = value
            return
        found = rule.translate(self.name, value, functools.partial(getattr, args))
        today = rule.replaced_by
        if not found and today is not None and rule.kind is bool and rule.read_from(args):
            found = {today: _default(type(args), today)}
        warnings.warn(_told(rule, self.name, value, found), FutureWarning, stacklevel=get_script_stacklevel())
        for name, meant in found.items():
            setattr(args, name, meant)
        if rule.replaced_by is None:
            vars(args)[self.name] = value

    def _is_field_of(self, args: Any) -> bool:
        return self.name in type(args).__dataclass_fields__


class AcceptsEarlierNames:
    """Base of argument classes whose constructors and attributes take earlier names too, and refuse unknown ones.

    A dataclass decorator generates a constructor after the class was made, so `__new__`, which is called before it,
    checks the names and prepares the constructors. A constructor that takes `**kwargs` is left alone.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            parameters = _parameters_of(cls.__init__)
            unknown = [name for name in kwargs if name not in parameters and name not in EARLIER_NAMES]
            if unknown and not _takes_any(parameters):
                raise TypeError(format_unknown_names(cls.__name__, unknown, list(parameters)[1:]))
            for owner in cls.__mro__:
                if issubclass(owner, AcceptsEarlierNames) and dataclasses.is_dataclass(owner):
                    _prepare_constructor(owner)
        return super().__new__(cls)


for _name in EARLIER_NAMES:
    setattr(AcceptsEarlierNames, _name, EarlierAttribute(_name))


# With 121 parameters, reading them is half of what making arguments costs; a search makes them for each trial.
@functools.lru_cache(maxsize=16)
def _parameters_of(constructor: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(constructor).parameters


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def format_unknown_names(class_name: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return one sentence that lists each unknown name with the name it probably stands for."""
    known = list(known)
    return f"{class_name}: {'; '.join(f'{name!r} is unknown, {suggest_name(name, known)}' for name in unknown)}"


def _prepare_constructor(cls: type) -> None:
    constructor = vars(cls).get("__init__")
    if constructor is None or hasattr(constructor, "takes_earlier_names"):
        return
    parameters = _parameters_of(constructor)
    if _takes_any(parameters):
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
            if EARLIER_NAMES[name].replaced_by is None:
                vars(self)[name] = kwargs[name]

    __init__.takes_earlier_names = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
