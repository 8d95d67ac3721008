"""Argument names of earlier transformers releases, and their translation."""

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

_OFF = (False, None)
Current = Callable[[str], Any]
"""Function from the name of an argument to its value, or its default."""


@dataclass(frozen=True)
class EarlierName:
    """Rule for an argument of an earlier release.

    Parameters:
        advice: end of "X is no longer an argument: ...".
        replaced_by: the new argument; without it only `idle` values are accepted.
        idle: values without effect, first the former default.
        kind: type of the command-line option.
        convert: returns the new value for an earlier value.
        read: returns the earlier value for a new value.
        extends: add to the new argument instead of replacing it.
        harmless: drop every value.
    """

    advice: str
    replaced_by: str | None = None
    idle: tuple[Any, ...] = (None,)
    kind: type = str
    convert: Callable[[Any, Current], Any] = lambda value, current: value
    read: Callable[[Any], Any] = lambda value: value
    extends: bool = False
    harmless: bool = False

    def is_without_effect(self, value: Any) -> bool:
        return self.harmless or any(value == idle and type(value) is type(idle) for idle in self.idle)

    def translate(self, name: str, value: Any, current: Current) -> dict[str, Any]:
        if self.is_without_effect(value):
            return {}
        if self.replaced_by is None:
            raise ValueError(f"{_format(name, value)} is no longer possible: {self.advice}")
        return {self.replaced_by: self.convert(value, current)}

    def get_value(self, args: Any) -> Any:
        return self.idle[0] if self.replaced_by is None else self.read(getattr(args, self.replaced_by))


def _renamed(name: str, kind: type = str) -> EarlierName:
    return EarlierName(f"use {name}", name, kind=kind)


def _entry(
    name: str, key: str, kind: type = bool, idle: tuple[Any, ...] = (None,), is_list: bool = False
) -> EarlierName:
    """Return the rule of an argument that became an entry of a dict."""

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
    names = current("include_for_metrics") or []
    return list(dict.fromkeys([*([names] if isinstance(names, str) else names), "inputs"]))


def _count_tokens(_: Any, current: Current) -> Any:
    counted = current("include_num_input_tokens_seen")
    return "all" if counted in (False, None, "no") else counted


def _add_organization(organization: str, current: Current) -> str:
    folder = os.path.basename(os.path.normpath(current("output_dir") or "trainer_output"))
    return f"{organization}/{(current('hub_model_id') or folder).rpartition('/')[2]}"


_TORCH_PRECISION = "drop it, mixed precision always comes from torch"

EARLIER_NAMES: Mapping[str, EarlierName] = MappingProxyType(
    {
        # Renamed.
        "evaluation_strategy": _renamed("eval_strategy"),
        "per_gpu_train_batch_size": _renamed("per_device_train_batch_size", int),
        "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size", int),
        "push_to_hub_token": _renamed("hub_token"),
        "torchdynamo": _renamed("torch_compile_backend"),
        "no_cuda": _switch("use_cpu", True),
        # Value of another argument.
        "adafactor": _switch("optim", "adafactor"),
        "group_by_length": _switch("train_sampling_strategy", "group_by_length"),
        "include_inputs_for_metrics": EarlierName(
            'use include_for_metrics=["inputs"]',
            "include_for_metrics",
            _OFF,
            bool,
            _add_inputs,
            lambda names: "inputs" in (names or ()),
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
        # Before the organization, which prefixes this name.
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
        # Set through the environment.
        "tpu_metrics_debug": _gone("drop it, nothing here runs on TPUs", False, kind=bool),
        "tpu_num_cores": _gone("set the environment variable TPU_NUM_CORES", kind=int),
        "ray_scope": _gone("set the environment variable RAY_SCOPE", "last"),
        # Removed features.
        "fp16_backend": _gone(_TORCH_PRECISION, "auto", "amp", "cuda_amp", "cpu_amp"),
        "half_precision_backend": _gone(_TORCH_PRECISION, "auto", "amp", "cuda_amp", "cpu_amp"),
        "jit_mode_eval": _gone("evaluation is not traced any more, use torch_compile=True", False, kind=bool),
        "save_safetensors": _gone("drop it, weights are always saved as safetensors", True, kind=bool),
        "past_index": _gone("drop it, there is no replacement", -1, kind=int),
        "use_legacy_prediction_loop": _gone("drop it, evaluation_loop does that work", False, kind=bool),
        "mp_parameters": _gone("drop it, there is no SageMaker model parallelism any more", ""),
        "_n_gpu": _gone("drop it, each process uses one GPU", -1, 0, 1, kind=int),
        # Nothing to set.
        "overwrite_output_dir": EarlierName(
            "drop it, an existing folder is never an error", None, (False,), bool, harmless=True
        ),
        "use_mps_device": EarlierName("drop it, an Apple GPU is found by itself", None, (False,), bool, harmless=True),
        "fp16_opt_level": EarlierName("drop it, it was for apex alone", None, ("O1",), harmless=True),
    }
)
"""Earlier name -> its rule, in the order of translation."""


# ---- Construction and attributes -------------------------------------------------------------------------------------


def earlier_names_of(cls: type, names: Any) -> list[str]:
    """Return the earlier names that are no fields of a class, in order of translation."""
    fields: Any = cls.__dataclass_fields__  # type: ignore[attr-defined]
    return [name for name in EARLIER_NAMES if name in names and name not in fields]


def translate_earlier_names(cls: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Translate earlier names in keywords, each with a FutureWarning."""
    names = earlier_names_of(cls, keywords)
    today = {name: value for name, value in keywords.items() if name not in names}
    errors = []
    for name in names:
        rule, value = EARLIER_NAMES[name], keywords[name]
        try:
            translation = rule.translate(name, value, functools.partial(_get_current, cls, today))
            for new_name, new_value in translation.items():
                # Command-line parsers also pass defaults.
                present = _get_current(cls, today, new_name)
                if not rule.extends and present not in (new_value, _get_default(cls, new_name)):
                    contradiction = f"{_format(name, value)} contradicts {_format(new_name, present)}"
                    raise ValueError(f"{contradiction}; {rule.advice} alone")
        except ValueError as error:
            errors.append(str(error))
            continue
        today.update(translation)
        warnings.warn(
            _format_warning(rule, name, value, translation), FutureWarning, stacklevel=get_script_stacklevel()
        )
    if errors:
        raise ValueError(f"{cls.__name__}: {'; '.join(errors)}.")
    return today


def _get_current(cls: type, today: Mapping[str, Any], name: str) -> Any:
    return today[name] if name in today else _get_default(cls, name)


def _get_default(cls: type, name: str) -> Any:
    return get_default(cls.__dataclass_fields__[name])  # type: ignore[attr-defined]


def _format_warning(rule: EarlierName, name: str, value: Any, translation: Mapping[str, Any]) -> str:
    if not translation:
        advice = rule.advice if rule.harmless else "leave it out"
        return f"{_format(name, value)} changes nothing and {name} is no longer an argument: {advice}."
    replacement = ", ".join(_format(new_name, new_value) for new_name, new_value in translation.items())
    return f"{_format(name, value)} is an earlier spelling: write {replacement}."


def _format(name: str, value: Any) -> str:
    return name if name.endswith("_token") else f"{name}={getattr(value, 'value', value)!r}"


def apply_fields_with_earlier_names(args: Any) -> None:
    """Translate fields of a script's dataclass, unless the new argument overrides a default."""
    cls = type(args)
    for name, field in cls.__dataclass_fields__.items():
        rule = EARLIER_NAMES.get(name)
        if rule is None or rule.is_without_effect(value := vars(args)[name]):
            continue
        translation = rule.translate(name, value, functools.partial(getattr, args))
        changes = {new_name: new for new_name, new in translation.items() if getattr(args, new_name) != new}
        conflicts = [new for new in changes if not rule.extends and getattr(args, new) != _get_default(cls, new)]
        if conflicts and value != get_default(field):
            present = _format(conflicts[0], getattr(args, conflicts[0]))
            raise ValueError(f"{cls.__name__}: {_format(name, value)} contradicts {present}; {rule.advice} alone.")
        if changes and not conflicts:
            message = _format_warning(rule, name, value, changes)
            warnings.warn(message, FutureWarning, stacklevel=get_script_stacklevel())
            vars(args).update(changes)


class EarlierAttribute:
    """Descriptor of an earlier name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, args: Any, owner: type) -> Any:
        # Else a dataclass takes the descriptor as a field's default.
        if args is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")
        if self.name in vars(args):
            return vars(args)[self.name]
        if self._is_field_of(args):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}")
        return EARLIER_NAMES[self.name].get_value(args)

    def __set__(self, args: Any, value: Any) -> None:
        rule = EARLIER_NAMES[self.name]
        if self._is_field_of(args):
            vars(args)[self.name] = value
            return
        translation = rule.translate(self.name, value, functools.partial(getattr, args))
        today = rule.replaced_by
        if not translation and today is not None and rule.kind is bool and rule.get_value(args):
            translation = {today: _get_default(type(args), today)}
        message = _format_warning(rule, self.name, value, translation)
        warnings.warn(message, FutureWarning, stacklevel=get_script_stacklevel())
        for new_name, new_value in translation.items():
            setattr(args, new_name, new_value)
        if rule.replaced_by is None:
            vars(args)[self.name] = value

    def _is_field_of(self, args: Any) -> bool:
        return self.name in type(args).__dataclass_fields__


class AcceptsEarlierNames:
    """Base of classes that accept earlier names and reject unknown names.

    `__new__` wraps the constructors, which the dataclass decorator generates after `__init_subclass__`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            parameters = _parameters_of(cls.__init__)
            unknown = [name for name in kwargs if name not in parameters and name not in EARLIER_NAMES]
            if unknown and not _has_var_keyword(parameters):
                raise TypeError(format_unknown_names(cls.__name__, unknown, list(parameters)[1:]))
            for owner in cls.__mro__:
                if issubclass(owner, AcceptsEarlierNames) and dataclasses.is_dataclass(owner):
                    _prepare_constructor(owner)
        return super().__new__(cls)


for _name in EARLIER_NAMES:
    setattr(AcceptsEarlierNames, _name, EarlierAttribute(_name))


# Half of the cost of a constructor call; a search makes arguments for each trial.
@functools.lru_cache(maxsize=16)
def _parameters_of(constructor: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(constructor).parameters


def _has_var_keyword(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def format_unknown_names(class_name: str, unknown: Iterable[str], valid: Iterable[str]) -> str:
    valid = list(valid)
    return f"{class_name}: {'; '.join(f'{name!r} is unknown, {suggest_name(name, valid)}' for name in unknown)}"


def _prepare_constructor(cls: type) -> None:
    constructor = vars(cls).get("__init__")
    if constructor is None or hasattr(constructor, "takes_earlier_names"):
        return
    parameters = _parameters_of(constructor)
    if _has_var_keyword(parameters):
        return

    @functools.wraps(constructor)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        names = [name for name in earlier_names_of(type(self), kwargs) if name not in parameters]
        with ShortTraceback():
            if names:
                # `output_dir`, from which a Hub name may follow, is usually passed by position.
                positional = dict(zip(list(parameters)[1:], args, strict=False))
                constructor(self, **translate_earlier_names(type(self), {**positional, **kwargs}))
            else:
                constructor(self, *args, **kwargs)
        for name in names:
            if EARLIER_NAMES[name].replaced_by is None:
                vars(self)[name] = kwargs[name]

    __init__.takes_earlier_names = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
