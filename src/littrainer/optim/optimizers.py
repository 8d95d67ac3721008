"""Optimizers by their `optim` names; libraries are imported on first use."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from littrainer.arguments.choices import OptimizerNames, ParallelMode
from littrainer.arguments.deepspeed import has_deepspeed
from littrainer.arguments.did_you_mean import format_accepted_names
from littrainer.arguments.json_values import truth
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.distributed.layout import tensor_parallel_size
from littrainer.optim.layerwise import LayerwiseOptimizer, step_in_backward

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

Convert = Callable[[str], Any]
Keywords = dict[str, Any]


@dataclass(slots=True)
class Optimization:
    """Optimizer and schedule of a training.

    Attributes:
        optimizer: None before the first training, unless the user passed it.
        is_default_schedule: whether the Trainer created the schedule.
        is_schedule_overridden: whether a Lightning callback sets the learning rate.
    """

    optimizer: Any = None
    schedule: Any = None
    is_default_schedule: bool = False
    is_schedule_overridden: bool = False


def parse_dtype(text: str) -> Any:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected a dtype of torch such as float32 or bfloat16, got {text!r}")
    return dtype


def parse_optim_args(
    optim: str, text: str | None, accepted: Mapping[str, Convert], adam: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the settings in `optim_args`, converted to the optimizer's types.

    Parameters:
        text: comma-separated `key=value` pairs.
        accepted: key -> converter of its value.
        adam: keywords that are set by the Adam arguments.

    Raises:
        ValueError: the text is malformed, or has an unknown key or an impossible value.
    """
    settings = {}
    for pair in text.replace(" ", "").split(",") if text else ():
        key, _, value = pair.partition("=")
        if not key or not value or "=" in value:
            raise ValueError(
                f"optim_args={text!r} has {pair!r}, which is no key=value; write it as key=value,key=value."
            )
        if value.lower() == FIXED_SETTINGS.get(optim, {}).get(key):
            continue
        if key not in accepted and key in ("lr", "weight_decay", *adam):
            raise ValueError(f"optim_args has {key!r}, which an argument decides: set {ARGUMENTS_BY_KEYWORD[key]}.")
        if key not in accepted:
            raise ValueError(
                f"optim_args has {key!r}, which optim={optim!r} does not take{format_accepted_names(key, accepted)}."
            )
        try:
            settings[key] = accepted[key](value)
        except ValueError as error:
            raise ValueError(f"optim_args has {key}={value}, which optim={optim!r} cannot read: {error}.") from None
    return settings


ARGUMENTS_BY_KEYWORD = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1, adam_beta2",
    "eps": "adam_epsilon",
}
# Settings that the Trainer always passes; optim_args may repeat them.
FIXED_SETTINGS: dict[str, dict[str, str]] = {"adafactor": {"scale_parameter": "false", "relative_step": "false"}}


@dataclass(frozen=True)
class Request:
    """Input from which an entry builds its keywords."""

    optim: str
    args: TrainingArguments
    settings: dict[str, Any]
    model: nn.Module | None = None

    def adam(self) -> Keywords:
        args = self.args
        return {"betas": (float(args.adam_beta1), float(args.adam_beta2)), "eps": args.adam_epsilon}

    def require_model(self) -> nn.Module:
        if self.model is None:
            raise ValueError(f"optim={self.optim!r} needs the model: call get_optimizer_cls_and_kwargs(args, model).")
        return self.model


class OptimizerNotInstalledError(ImportError, ValueError):
    """Missing library of an optimizer; transformers raises either base class, depending on the optimizer."""


@dataclass(frozen=True)
class OptimizerEntry:
    """Row of the table.

    Parameters:
        paths: candidates for the class, as "module:class"; the first importable path is used.
        adam: Adam's keywords that the class takes.
        defaults: further keywords, in addition to the learning rate.
        settings: keys allowed in `optim_args`, with their converters; they override the defaults.
        package: argument of `pip install`; None for torch's own optimizers.
        finish: adds keywords that depend on several arguments or on the model.
        projects: whether `optim_args` sets the projection of gradients of `optim_target_modules`.
        is_layerwise: whether each parameter has a separate optimizer.
    """

    paths: tuple[str, ...]
    adam: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Convert] = field(default_factory=dict)
    package: str | None = None
    finish: Callable[[Request, Keywords], Keywords] = lambda request, keywords: keywords
    projects: bool = False
    is_layerwise: bool = False

    def load_class(self, optim: str) -> Any:
        """Import the class, or raise an OptimizerNotInstalledError."""
        reasons = []
        for path in self.paths:
            module, name = path.split(":")
            try:
                return getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                reasons.append(str(error))
        raise OptimizerNotInstalledError(
            f"optim={optim!r} needs {self.paths[0].replace(':', '.')}, which cannot be imported "
            f"({'; '.join(reasons)}). Run `pip install {self.package!r}`, or choose another optim."
        )

    def keywords(self, request: Request) -> Keywords:
        adam = request.adam()
        settings = {} if self.projects else request.settings
        keywords = {"lr": request.args.learning_rate, **{name: adam[name] for name in self.adam}}
        return self.finish(request, {**keywords, **self.defaults, **settings})


ALL_LINEAR = ("all-linear", "all_linear")

GALORE: Keywords = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
PROJECTION: dict[str, Keywords] = {
    "galore": GALORE,
    "apollo": {**GALORE, "scale": 1.0, "proj": "random", "scale_type": "channel"},
}


def build_projected_groups(request: Request) -> list[dict[str, Any]]:
    """Return two groups: all other parameters, and the target weights with their projection settings."""
    model = request.require_model()
    names = {f"{module}.weight" for module in _target_modules(model, request)}
    family = request.optim.split("_")[0]
    projection = {**PROJECTION[family], **request.settings, **(request.adam() if family == "apollo" else {})}
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for name, parameter in model.named_parameters():
        groups[name in names].append(parameter)
    return [{"params": groups[False]}, {"params": groups[True], **projection}]


def build_layerwise_optimizer(
    optimizer_class: Any, keywords: Keywords, groups: list[dict[str, Any]], request: Request
) -> tuple[type[LayerwiseOptimizer], Keywords]:
    """Create an optimizer for each parameter; return the class and keywords of their placeholder."""
    args = request.args
    if args.parallel_mode == ParallelMode.DISTRIBUTED:
        raise NotImplementedError(f"optim={request.optim!r} works on one process only; choose one without `layerwise`.")
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"optim={request.optim!r} steps at each backward pass and cannot accumulate; set "
            f"gradient_accumulation_steps=1 instead of {args.gradient_accumulation_steps}."
        )
    if args.max_grad_norm:
        logger.warning("optim=%r steps before gradients can be clipped: max_grad_norm has no effect.", request.optim)
    optimizers = {
        parameter: optimizer_class([{**group, "params": [parameter]}], **keywords)
        for group in groups
        for parameter in group["params"]
    }
    step_in_backward(optimizers)
    return LayerwiseOptimizer, {**keywords, "optimizer_dict": optimizers}


def _target_modules(model: nn.Module, request: Request) -> list[str]:
    targets: Any = request.args.optim_target_modules
    if targets is None:
        raise ValueError(
            f"optim={request.optim!r} projects the weights of some modules: name them in optim_target_modules, as a "
            "list, a regular expression or 'all-linear'."
        )
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if targets in ALL_LINEAR or is_target(targets, name):
                names.append(name)
        elif targets == name or (not isinstance(targets, str) and any(target in name for target in targets)):
            # Warn of names only: an expression may match many other modules.
            logger.warning("optim_target_modules names %s, which is no linear layer; it is not projected.", name)
    if not names:
        raise ValueError(f"optim_target_modules={targets!r} names no linear layer of {type(model).__name__}.")
    return names


def is_target(targets: str | list[str], name: str) -> bool:
    """Return whether `optim_target_modules` (an expression, or a list of substrings and expressions) matches a path."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(target in name or re.fullmatch(target, name) is not None for target in targets)


ADAM, BETAS = ("betas", "eps"), ("betas",)
ADAFACTOR: Keywords = {"scale_parameter": False, "relative_step": False}

BUILT_IN: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.ADAMW_TORCH: OptimizerEntry(("torch.optim:AdamW",), ADAM),
    OptimizerNames.ADAMW_TORCH_FUSED: OptimizerEntry(("torch.optim:AdamW",), ADAM, {"fused": True}),
    OptimizerNames.ADAFACTOR: OptimizerEntry(
        ("transformers.optimization:Adafactor",),
        defaults=ADAFACTOR,
        package="transformers",
    ),
    OptimizerNames.SGD: OptimizerEntry(
        ("torch.optim:SGD",),
        settings={"momentum": float, "dampening": float, "nesterov": truth},
    ),
    OptimizerNames.ADAGRAD: OptimizerEntry(
        ("torch.optim:Adagrad",), settings=dict.fromkeys(("lr_decay", "eps"), float)
    ),
    OptimizerNames.RMSPROP: OptimizerEntry(
        ("torch.optim:RMSprop",),
        settings={**dict.fromkeys(("momentum", "alpha", "eps"), float), "centered": truth},
    ),
}

# Name -> class in bitsandbytes.optim, bits of its state, is_paged.
BITSANDBYTES: dict[OptimizerNames, tuple[str, int, bool]] = {
    OptimizerNames.ADAMW_BNB: ("AdamW", 8, False),
    OptimizerNames.ADAMW_8BIT: ("AdamW", 8, False),
    OptimizerNames.PAGED_ADAMW: ("AdamW", 32, True),
    OptimizerNames.PAGED_ADAMW_8BIT: ("AdamW", 8, True),
    OptimizerNames.ADEMAMIX: ("AdEMAMix", 32, False),
    OptimizerNames.ADEMAMIX_8BIT: ("AdEMAMix", 8, False),
    OptimizerNames.PAGED_ADEMAMIX: ("AdEMAMix", 32, True),
    OptimizerNames.PAGED_ADEMAMIX_8BIT: ("AdEMAMix", 8, True),
    OptimizerNames.LION: ("Lion", 32, False),
    OptimizerNames.LION_8BIT: ("Lion", 8, False),
    OptimizerNames.PAGED_LION: ("Lion", 32, True),
    OptimizerNames.PAGED_LION_8BIT: ("Lion", 8, True),
    OptimizerNames.RMSPROP_BNB: ("RMSprop", 32, False),
    OptimizerNames.RMSPROP_8BIT: ("RMSprop", 8, False),
    OptimizerNames.RMSPROP_32BIT: ("RMSprop", 32, False),
}
BITSANDBYTES_SETTINGS: dict[str, dict[str, Convert]] = {
    "AdEMAMix": {
        **dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), float),
        **dict.fromkeys(("t_alpha", "t_beta3"), int),
    },
    "RMSprop": {
        **dict.fromkeys(("alpha", "eps", "momentum"), float),
        **dict.fromkeys(("min_8bit_size", "percentile_clipping"), int),
        **dict.fromkeys(("centered", "block_wise"), truth),
    },
}


GROKADAMW = {"alpha_init": 0.98, "lamb": 2.0, "gamma": 0.1, "grokking_signal_decay_rate": 0.1, "gradient_clipping": 1.0}
ANYPRECISION_TYPES = {
    "momentum_dtype": torch.float32,
    "variance_dtype": torch.float32,
    "compensation_buffer_dtype": torch.bfloat16,
}


def _bitsandbytes(kind: str, bits: int, is_paged: bool) -> OptimizerEntry:
    adam: dict[str, tuple[str, ...]] = {"AdamW": ADAM, "AdEMAMix": ADAM, "Lion": BETAS, "RMSprop": ()}
    memory: Keywords = {"optim_bits": bits, "is_paged": is_paged}
    if kind == "RMSprop":
        del memory["is_paged"]
    path, settings = f"bitsandbytes.optim:{kind}", BITSANDBYTES_SETTINGS.get(kind, {})
    entry = OptimizerEntry((path,), adam[kind], memory, settings, "bitsandbytes")
    if kind == "AdEMAMix":
        return replace(entry, defaults={**memory, "beta3": 0.9999, "alpha": 5.0}, finish=_merge_betas)
    return entry


def _merge_betas(request: Request, keywords: Keywords) -> Keywords:
    first, second = keywords.pop("betas")
    betas = (keywords.pop("beta1", first), keywords.pop("beta2", second), keywords.pop("beta3"))
    return {**keywords, "betas": betas}


def _torchao(kind: str) -> OptimizerEntry:
    return OptimizerEntry(
        (f"torchao.optim:{kind}", f"torchao.prototype.low_bit_optim:{kind}"),
        ADAM,
        {"block_size": 256, "bf16_stochastic_round": False},
        {"block_size": int, "bf16_stochastic_round": truth},
        "torchao>=0.4.0",
    )


def _projecting(kind: str, is_layerwise: bool = False) -> OptimizerEntry:
    is_apollo = kind.startswith("APOLLO")
    texts = ("proj", "scale_type", "proj_type") if is_apollo else ("proj_type",)
    library = "apollo" if is_apollo else "galore"
    return OptimizerEntry(
        (f"{library}_torch:{kind}",),
        defaults=ADAFACTOR if kind.endswith("Adafactor") else {},
        settings={"rank": int, "update_proj_gap": int, "scale": float, **dict.fromkeys(texts, str)},
        package=f"{library}-torch",
        projects=True,
        is_layerwise=is_layerwise,
    )


def _schedule_free(kind: str, adam: tuple[str, ...] = ADAM, package: str = "schedulefree") -> OptimizerEntry:
    defaults, settings = {"weight_lr_power": 2.0, "r": 0.0}, {"weight_lr_power": float, "r": float}
    return OptimizerEntry((f"schedulefree:{kind}",), adam, defaults, settings, package, _add_decay_and_warmup)


def _add_decay(request: Request, keywords: Keywords) -> Keywords:
    return {**keywords, "weight_decay": request.args.weight_decay}


def _add_decay_and_warmup(request: Request, keywords: Keywords) -> Keywords:
    args, keywords = request.args, _add_decay(request, keywords)
    if request.optim == OptimizerNames.SCHEDULE_FREE_RADAM:
        return keywords
    steps: float = args.warmup_steps
    if 0 < steps < 1:
        if args.max_steps <= 0:
            raise ValueError(
                f"optim={request.optim!r} does the warmup itself and needs the number of its optimizer steps: give "
                f"warmup_steps as a number of steps instead of a share ({args.warmup_steps}), or set max_steps."
            )
        steps = args.get_warmup_steps(args.max_steps)
    return {**keywords, "warmup_steps": steps}


def _lomo(kind: str) -> OptimizerEntry:
    return OptimizerEntry(
        (f"lomo_optim:{kind}",),
        package="lomo-optim",
        finish=lambda request, keywords: {**keywords, "model": request.require_model()},
    )


def _muon(request: Request, keywords: Keywords) -> Keywords:
    from littrainer.optim.muon import select_adamw_parameters

    args, model = request.args, request.require_model()
    if has_deepspeed(args) or get_sharding_plan(args) is not None or tensor_parallel_size(args) > 1:
        raise ValueError(
            f"optim={request.optim!r} needs each matrix as a whole, and FSDP, DeepSpeed and tensor parallelism split "
            "them: train without these, or choose another optim, such as adamw_torch_fused."
        )
    by_adamw = list(chain.from_iterable(select_adamw_parameters(model).values()))
    return {"adamw_lr": args.learning_rate, **keywords, "by_adamw": by_adamw}


# The adjusted rate makes steps as large as AdamW's.
MUON = OptimizerEntry(
    ("littrainer.optim.muon:MuonWithAdamW",),
    ADAM,
    {"adjust_lr_fn": "match_rms_adamw"},
    {**dict.fromkeys(("momentum", "adamw_lr"), float), "nesterov": truth, "ns_steps": int, "adjust_lr_fn": str},
    "torch>=2.9",
    _muon,
)

THIRD_PARTY: dict[OptimizerNames, OptimizerEntry] = {
    **{name: _bitsandbytes(*kind) for name, kind in BITSANDBYTES.items()},
    OptimizerNames.ADAMW_TORCH_XLA: OptimizerEntry(("torch_xla.amp.syncfree:AdamW",), ADAM, package="torch-xla"),
    OptimizerNames.ADAMW_TORCH_NPU_FUSED: OptimizerEntry(("torch_npu.optim:NpuFusedAdamW",), ADAM, package="torch-npu"),
    OptimizerNames.ADAMW_ANYPRECISION: OptimizerEntry(
        ("torchdistx.optimizers:AnyPrecisionAdamW",),
        ADAM,
        {"use_kahan_summation": False, **ANYPRECISION_TYPES},
        {"use_kahan_summation": truth, **dict.fromkeys(ANYPRECISION_TYPES, parse_dtype)},
        "torchdistx @ git+https://github.com/pytorch/torchdistx",
    ),
    OptimizerNames.ADAMW_TORCH_4BIT: _torchao("AdamW4bit"),
    OptimizerNames.ADAMW_TORCH_8BIT: _torchao("AdamW8bit"),
    OptimizerNames.GALORE_ADAMW: _projecting("GaLoreAdamW"),
    OptimizerNames.GALORE_ADAMW_8BIT: _projecting("GaLoreAdamW8bit"),
    OptimizerNames.GALORE_ADAFACTOR: _projecting("GaLoreAdafactor"),
    OptimizerNames.GALORE_ADAMW_LAYERWISE: _projecting("GaLoreAdamW", is_layerwise=True),
    OptimizerNames.GALORE_ADAMW_8BIT_LAYERWISE: _projecting("GaLoreAdamW8bit", is_layerwise=True),
    OptimizerNames.GALORE_ADAFACTOR_LAYERWISE: _projecting("GaLoreAdafactor", is_layerwise=True),
    OptimizerNames.APOLLO_ADAMW: _projecting("APOLLOAdamW"),
    OptimizerNames.APOLLO_ADAMW_LAYERWISE: _projecting("APOLLOAdamW", is_layerwise=True),
    OptimizerNames.LOMO: _lomo("Lomo"),
    OptimizerNames.ADALOMO: _lomo("AdaLomo"),
    OptimizerNames.GROKADAMW: OptimizerEntry(
        ("grokadamw:GrokAdamW",),
        defaults=GROKADAMW,
        settings=dict.fromkeys(GROKADAMW, float),
        package="grokadamw",
    ),
    OptimizerNames.SCHEDULE_FREE_RADAM: _schedule_free("RAdamScheduleFree", package="schedulefree>=1.4.0"),
    OptimizerNames.SCHEDULE_FREE_ADAMW: _schedule_free("AdamWScheduleFree"),
    OptimizerNames.SCHEDULE_FREE_SGD: _schedule_free("SGDScheduleFree", adam=()),
    OptimizerNames.STABLE_ADAMW: OptimizerEntry(
        ("optimi:StableAdamW",),
        ADAM,
        {"decouple_lr": False, "max_lr": None, "kahan_sum": None},
        {"decouple_lr": truth, "max_lr": float, "kahan_sum": truth},
        "torch-optimi",
        _add_decay,
    ),
}

OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {**BUILT_IN, OptimizerNames.MUON: MUON, **THIRD_PARTY}

# Keywords that replace the parameter groups.
GROUP_REPLACEMENTS = ("params", "model", "optimizer_dict")


def get_optimizer_class_and_keywords(args: TrainingArguments, model: nn.Module | None = None) -> tuple[Any, Keywords]:
    """Return the class and constructor keywords of `args.optim`.

    Parameters:
        model: required by low-rank optimizers, LOMO and Muon.

    Raises:
        ImportError: the optimizer's library is not installed.
        ValueError: `optim_args` or `optim_target_modules` do not suit the optimizer.
    """
    name = OptimizerNames(args.optim)
    entry = OPTIMIZERS[name]
    settings = parse_optim_args(name.value, args.optim_args, entry.settings, entry.adam)
    optimizer_class = entry.load_class(name.value)
    request = Request(name.value, args, settings, model)
    keywords = entry.keywords(request)
    if not entry.projects:
        return optimizer_class, keywords
    groups = build_projected_groups(request)
    if entry.is_layerwise:
        optimizer_class, keywords = build_layerwise_optimizer(optimizer_class, keywords, groups, request)
    return optimizer_class, {**keywords, "params": groups}


def build_optimizer(model: nn.Module, groups: list[dict[str, Any]], optimizer_class: Any, keywords: Keywords) -> Any:
    """Create the optimizer of a model.

    Parameters:
        groups: parameter groups, unless the keywords replace them.
        optimizer_class: a class, or a factory class whose instance is called with model and keywords.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        return optimizer_class()(model, **keywords)
    keywords = dict(keywords)
    params: Any = groups
    for name in GROUP_REPLACEMENTS:
        params = keywords.pop(name, params)
    optimizer = optimizer_class(params, **keywords)
    if "bitsandbytes" in optimizer_class.__module__ and keywords.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(model)
    return optimizer


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    # As bitsandbytes advises: 8-bit state makes embeddings unstable.
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
