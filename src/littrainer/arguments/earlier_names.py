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
from littrainer.arguments.choices import stacklevel_of_script
from littrainer.arguments.did_you_mean import suggestion
from littrainer.arguments.fields import default_of
from littrainer.arguments.json_values import parse_json_object, read_json_object
from littrainer.errors.tracebacks import ShortTraceback

Current = Callable[[str], Any]
"""Takes the name of an argument, returns what the script has given for it, or its default."""


@dataclass(frozen=True)
class EarlierName:
    """What became of one argument.

    Parameters:
        advice: what to write instead, as the end of the sentence "X is no longer an argument: ...".
        meaning: takes a value and the current values of today's arguments, returns the arguments of today that it
            sets; None refuses every value but the `idle` ones.
        replaced_by: the argument that took over, None if there is none.
        idle: values that ask for nothing, the former default first.
        kind: how a command line reads the value.
        extends: the meaning adds to a value of today's argument instead of contradicting it.
        harmless: no value ever changed the numbers of a run, so each may be dropped.
        read: takes arguments, returns what a script finds under the earlier name; None if it finds what it gave.
    """

    advice: str
    meaning: Callable[[Any, Current], dict[str, Any]] | None = None
    replaced_by: str | None = None
    idle: tuple[Any, ...] = (None,)
    kind: type = str
    extends: bool = False
    harmless: bool = False
    read: Callable[[Any], Any] | None = None

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether a value leaves everything as it is."""
        return self.harmless or any(value == idle and type(value) is type(idle) for idle in self.idle)


def _renamed(name: str, kind: type = str) -> EarlierName:
    return EarlierName(
        f"use {name}", lambda value, current: {name: value}, name, kind=kind, read=lambda args: getattr(args, name)
    )


def _switch(advice: str, name: str, value: Any) -> EarlierName:
    return EarlierName(
        advice,
        lambda switched_on, current: {name: value},
        name,
        (False, None),
        bool,
        read=lambda args: getattr(args, name) == value,
    )


def _entry(name: str, key: str, kind: type, idle: tuple[Any, ...] = (None,), several: bool = False) -> EarlierName:
    def meaning(value: Any, current: Current) -> dict[str, Any]:
        entries = _entries_of(current(name), name)
        if several:
            held = entries.get(key) or []
            value = [*([held] if isinstance(held, str) else held), value]
        return {name: {**entries, key: value}}

    return EarlierName(
        f'use {name}={{"{key}": {"[...]" if several else "..."}}}',
        meaning,
        name,
        idle,
        kind,
        extends=True,
        read=lambda args: _entries_of(getattr(args, name), name).get(key, idle[0]),
    )


def _entries_of(config: Any, name: str) -> dict[str, Any]:
    if isinstance(config, str):
        is_json = config.lstrip().startswith("{")
        return parse_json_object(config, name) if is_json else read_json_object(config, name)
    return config.to_dict() if isinstance(config, AcceleratorConfig) else dict(config or {})


def _gone(advice: str, *idle: Any, kind: type = str) -> EarlierName:
    return EarlierName(advice, idle=(*idle, None), kind=kind)


def _harmless(advice: str, default: Any, kind: type) -> EarlierName:
    return EarlierName(advice, idle=(default,), kind=kind, harmless=True)


def _inputs_too(_: Any, current: Current) -> dict[str, Any]:
    wanted = current("include_for_metrics") or []
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    return {"include_for_metrics": list(dict.fromkeys([*wanted, "inputs"]))}


def _tokens_counted(_: Any, current: Current) -> dict[str, Any]:
    counted = current("include_num_input_tokens_seen")
    return {"include_num_input_tokens_seen": "all" if counted in (False, None, "no") else counted}


def _within_organization(organization: str, current: Current) -> dict[str, Any]:
    folder = os.path.basename(os.path.normpath(current("output_dir") or "trainer_output"))
    return {"hub_model_id": f"{organization}/{(current('hub_model_id') or folder).rpartition('/')[2]}"}


_TORCH_PRECISION = "drop it, mixed precision always comes from torch"
_NO_REPLACEMENT = "drop it, there is no replacement"

EARLIER_NAMES: Mapping[str, EarlierName] = MappingProxyType(
    {
        # Spelled differently today.
        "evaluation_strategy": _renamed("eval_strategy"),
        "per_gpu_train_batch_size": _renamed("per_device_train_batch_size", int),
        "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size", int),
        "push_to_hub_token": _renamed("hub_token"),
        "torchdynamo": _renamed("torch_compile_backend"),
        "no_cuda": _switch("use use_cpu", "use_cpu", True),
        # A value of another argument today.
        "adafactor": _switch('use optim="adafactor"', "optim", "adafactor"),
        "group_by_length": _switch(
            'use train_sampling_strategy="group_by_length"', "train_sampling_strategy", "group_by_length"
        ),
        "include_inputs_for_metrics": EarlierName(
            'use include_for_metrics=["inputs"]',
            _inputs_too,
            "include_for_metrics",
            (False, None),
            bool,
            extends=True,
            read=lambda args: "inputs" in (args.include_for_metrics or ()),
        ),
        "include_tokens_per_second": EarlierName(
            "use include_num_input_tokens_seen",
            _tokens_counted,
            "include_num_input_tokens_seen",
            (False, None),
            bool,
            extends=True,
            read=lambda args: args.include_num_input_tokens_seen != "no",
        ),
        # The organisation goes in front of the name, so the name comes first.
        "push_to_hub_model_id": EarlierName(
            'use hub_model_id="name" or "organisation/name"',
            lambda name, _: {"hub_model_id": name},
            "hub_model_id",
            read=lambda args: args.hub_model_id,
        ),
        "push_to_hub_organization": EarlierName(
            'use hub_model_id="organisation/name"',
            _within_organization,
            "hub_model_id",
            extends=True,
            read=lambda args: (args.hub_model_id or "").rpartition("/")[0] or None,
        ),
        "fsdp_min_num_params": _entry("fsdp_config", "min_num_params", int, (0, None)),
        "fsdp_transformer_layer_cls_to_wrap": _entry("fsdp_config", "transformer_layer_cls_to_wrap", str, several=True),
        "dispatch_batches": _entry("accelerator_config", "dispatch_batches", bool),
        "split_batches": _entry("accelerator_config", "split_batches", bool),
        # Set through the environment today.
        "tpu_metrics_debug": _gone("drop it, nothing here runs on TPUs", False, kind=bool),
        "tpu_num_cores": _gone("set the environment variable TPU_NUM_CORES", kind=int),
        "ray_scope": _gone("set the environment variable RAY_SCOPE", "last"),
        # The feature is gone.
        "fp16_backend": _gone(_TORCH_PRECISION, "auto", "amp", "cuda_amp", "cpu_amp"),
        "half_precision_backend": _gone(_TORCH_PRECISION, "auto", "amp", "cuda_amp", "cpu_amp"),
        "jit_mode_eval": _gone("evaluation is not traced any more, use torch_compile=True", False, kind=bool),
        "save_safetensors": _gone("drop it, weights are always saved as safetensors", True, kind=bool),
        "past_index": _gone(_NO_REPLACEMENT, -1, kind=int),
        "use_legacy_prediction_loop": _gone("drop it, evaluation_loop does that work", False, kind=bool),
        "mp_parameters": _gone("drop it, there is no SageMaker model parallelism any more", ""),
        "_n_gpu": _gone("drop it, each process uses one GPU", -1, 0, 1, kind=int),
        # Nothing to set any more.
        "overwrite_output_dir": _harmless("drop it, an existing folder is never an error", False, bool),
        "use_mps_device": _harmless("drop it, an Apple GPU is found by itself", False, bool),
        "fp16_opt_level": _harmless("drop it, it was for apex alone", "O1", str),
    }
)
"""Earlier name -> what it means, in the order in which the meanings are worked out."""


# ---- Construction and attributes -------------------------------------------------------------------------------------


def earlier_names_of(cls: type, names: Any) -> list[str]:
    """Return the earlier names among `names` that are no fields of a class, in the order of their table."""
    own: Any = cls.__dataclass_fields__  # type: ignore[attr-defined]
    return [name for name in EARLIER_NAMES if name in names and name not in own]


def translated(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords with each earlier name replaced by what it means today; each is a FutureWarning.

    Parameters:
        cls: the argument class that the keywords are for.
        given: keywords under any mixture of names.

    Raises:
        ValueError: names what asks for something that is gone, or contradicts another keyword.
    """
    names = earlier_names_of(cls, given)
    today = {name: value for name, value in given.items() if name not in names}
    errors = []
    for name in names:
        rule, value = EARLIER_NAMES[name], given[name]
        try:
            found = _meaning(rule, name, value, functools.partial(_current, cls, today))
            for new, meant in found.items():
                # Command-line parsers give every argument, so a default may not have been meant.
                present = _current(cls, today, new)
                if not rule.extends and present not in (meant, _default(cls, new)):
                    raise ValueError(f"{_shown(name, value)} contradicts {_shown(new, present)}; {rule.advice} alone")
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
    return default_of(cls.__dataclass_fields__[name])  # type: ignore[attr-defined]


def _told(rule: EarlierName, name: str, value: Any, found: Mapping[str, Any]) -> str:
    if not found:
        advice = rule.advice if rule.harmless else "leave it out"
        return f"{_shown(name, value)} changes nothing and {name} is no longer an argument: {advice}."
    meant = ", ".join(_shown(new, meant) for new, meant in found.items())
    return f"{_shown(name, value)} is an earlier spelling: write {meant}."


def _shown(name: str, value: Any) -> str:
    return name if name.endswith("_token") else f"{name}={getattr(value, 'value', value)!r}"


class EarlierAttribute:
    """One earlier name as an attribute: scripts read and set fields of the arguments they parsed."""

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


class UnderstandsEarlierNames:
    """Base of argument classes whose constructors and attributes take earlier names too, and refuse unknown ones.

    A subclass's dataclass decorator generates a constructor that calls no other one, after the class was made. So
    `__new__`, which is called before it, checks the names and prepares the constructors. A constructor that takes
    `**kwargs` sorts them itself, and is left alone.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            parameters = _parameters_of(cls.__init__)
            unknown = [name for name in kwargs if name not in parameters and name not in EARLIER_NAMES]
            if unknown and not _takes_any(parameters):
                raise TypeError(unknown_names_message(cls.__name__, unknown, list(parameters)[1:]))
            for owner in cls.__mro__:
                if issubclass(owner, UnderstandsEarlierNames) and dataclasses.is_dataclass(owner):
                    _prepare_constructor(owner)
        return super().__new__(cls)


for _name in EARLIER_NAMES:
    setattr(UnderstandsEarlierNames, _name, EarlierAttribute(_name))


# With 121 parameters, reading them is half of what making arguments costs; a search makes them for each trial.
@functools.lru_cache(maxsize=16)
def _parameters_of(constructor: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(constructor).parameters


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def unknown_names_message(class_name: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return one sentence that lists each unknown name with the name it probably stands for."""
    known = list(known)
    return f"{class_name}: {'; '.join(f'{name!r} is unknown, {suggestion(name, known)}' for name in unknown)}"


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
            if EARLIER_NAMES[name].read is None:
                vars(self)[name] = kwargs[name]

    __init__.takes_earlier_names = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
