"""The optimizers that come from libraries of their own, which are imported when one of them is asked for."""

from __future__ import annotations

from littrainer.arguments.choices import OptimizerNames
from littrainer.optim.entries import (
    Keywords,
    OptimizerEntry,
    Request,
    adam,
    adam_and_settings,
    adam_only,
    learning_rate,
    learning_rate_and_settings,
)
from littrainer.optim.optimizer_arguments import Convert, torch_dtype, truth

# Name -> class in bitsandbytes.optim, bits of the optimizer's state, whether it is paged.
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
        **dict.fromkeys(("alpha", "eps", "weight_decay", "momentum"), float),
        **dict.fromkeys(("min_8bit_size", "percentile_clipping"), int),
        **dict.fromkeys(("centered", "block_wise"), truth),
    },
}


def _bitsandbytes_keywords(request: Request) -> Keywords:
    kind, bits, is_paged = BITSANDBYTES[OptimizerNames(request.optim)]
    memory: Keywords = {"optim_bits": bits, "is_paged": is_paged}
    if kind == "RMSprop":
        del memory["is_paged"]
        return {**learning_rate_and_settings(request), **memory}
    own = {"AdamW": adam_only, "Lion": _betas, "AdEMAMix": _ademamix_keywords}[kind](request)
    return {**learning_rate(request), **own, **memory}


def _betas(request: Request) -> Keywords:
    return {"betas": (request.args.adam_beta1, request.args.adam_beta2)}


def _ademamix_keywords(request: Request) -> Keywords:
    args, settings = request.args, {"beta3": 0.9999, "alpha": 5.0, **request.settings}
    betas = (
        settings.pop("beta1", args.adam_beta1),
        settings.pop("beta2", args.adam_beta2),
        settings.pop("beta3"),
    )
    return {"betas": betas, "eps": args.adam_epsilon, **settings}


def _grokadamw_keywords(request: Request) -> Keywords:
    defaults = {
        "alpha_init": 0.98,
        "lamb": 2.0,
        "gamma": 0.1,
        "grokking_signal_decay_rate": 0.1,
        "gradient_clipping": 1.0,
    }
    return {**learning_rate(request), **defaults, **request.settings}


def _schedule_free_keywords(request: Request) -> Keywords:
    args, name = request.args, request.optim
    keywords = learning_rate(request) if name == OptimizerNames.SCHEDULE_FREE_SGD else adam(request)
    keywords["weight_decay"] = args.weight_decay
    if name != OptimizerNames.SCHEDULE_FREE_RADAM:
        keywords["warmup_steps"] = _warmup_steps(request)
    return {**keywords, "weight_lr_power": 2.0, "r": 0.0, **request.settings}


def _warmup_steps(request: Request) -> float:
    args = request.args
    if 0 < args.warmup_steps < 1:
        if args.max_steps <= 0:
            raise ValueError(
                f"optim={request.optim!r} warms up by itself and has to know for how many optimizer steps: give "
                f"warmup_steps as a number of steps instead of a share ({args.warmup_steps}), or set max_steps."
            )
        return args.get_warmup_steps(args.max_steps)
    return args.warmup_steps


def _lomo_keywords(request: Request) -> Keywords:
    if request.model is None:
        raise ValueError(f"optim={request.optim!r} needs the model: call get_optimizer_cls_and_kwargs(args, model).")
    return {**learning_rate(request), "model": request.model}


def _stable_adamw_keywords(request: Request) -> Keywords:
    defaults = {"decouple_lr": False, "max_lr": None, "kahan_sum": None}
    return {**adam(request), "weight_decay": request.args.weight_decay, **defaults, **request.settings}


ANYPRECISION_DEFAULTS = {
    "use_kahan_summation": False,
    "momentum_dtype": torch_dtype("float32"),
    "variance_dtype": torch_dtype("float32"),
    "compensation_buffer_dtype": torch_dtype("bfloat16"),
}


def _bitsandbytes(name: OptimizerNames) -> OptimizerEntry:
    kind = BITSANDBYTES[name][0]
    settings = BITSANDBYTES_SETTINGS.get(kind, {})
    return OptimizerEntry((f"bitsandbytes.optim:{kind}",), _bitsandbytes_keywords, settings, "bitsandbytes")


def _torchao(kind: str) -> OptimizerEntry:
    return OptimizerEntry(
        (f"torchao.optim:{kind}", f"torchao.prototype.low_bit_optim:{kind}"),
        adam_and_settings({"block_size": 256, "bf16_stochastic_round": False}),
        {"block_size": int, "bf16_stochastic_round": truth},
        "torchao>=0.4.0",
    )


def _galore(kind: str, is_layerwise: bool = False) -> OptimizerEntry:
    return OptimizerEntry(
        (f"galore_torch:{kind}",),
        lambda request: {
            **learning_rate(request),
            **({"scale_parameter": False, "relative_step": False} if kind == "GaLoreAdafactor" else {}),
        },
        {"rank": int, "update_proj_gap": int, "scale": float, "proj_type": str},
        "galore-torch",
        projects=True,
        is_layerwise=is_layerwise,
    )


def _apollo(is_layerwise: bool = False) -> OptimizerEntry:
    return OptimizerEntry(
        ("apollo_torch:APOLLOAdamW",),
        learning_rate,
        {
            "rank": int,
            "proj": str,
            "scale_type": str,
            "update_proj_gap": int,
            "scale": float,
            "proj_type": str,
        },
        "apollo-torch",
        projects=True,
        is_layerwise=is_layerwise,
    )


def _schedule_free(kind: str, package: str = "schedulefree") -> OptimizerEntry:
    return OptimizerEntry(
        (f"schedulefree:{kind}",), _schedule_free_keywords, {"weight_lr_power": float, "r": float}, package
    )


THIRD_PARTY: dict[OptimizerNames, OptimizerEntry] = {
    **{name: _bitsandbytes(name) for name in BITSANDBYTES},
    OptimizerNames.ADAMW_TORCH_XLA: OptimizerEntry(("torch_xla.amp.syncfree:AdamW",), adam, package="torch-xla"),
    OptimizerNames.ADAMW_TORCH_NPU_FUSED: OptimizerEntry(("torch_npu.optim:NpuFusedAdamW",), adam, package="torch-npu"),
    OptimizerNames.ADAMW_ANYPRECISION: OptimizerEntry(
        ("torchdistx.optimizers:AnyPrecisionAdamW",),
        adam_and_settings(ANYPRECISION_DEFAULTS),
        {"use_kahan_summation": truth, **dict.fromkeys(list(ANYPRECISION_DEFAULTS)[1:], torch_dtype)},
        "torchdistx @ git+https://github.com/pytorch/torchdistx",
    ),
    OptimizerNames.ADAMW_TORCH_4BIT: _torchao("AdamW4bit"),
    OptimizerNames.ADAMW_TORCH_8BIT: _torchao("AdamW8bit"),
    OptimizerNames.GALORE_ADAMW: _galore("GaLoreAdamW"),
    OptimizerNames.GALORE_ADAMW_8BIT: _galore("GaLoreAdamW8bit"),
    OptimizerNames.GALORE_ADAFACTOR: _galore("GaLoreAdafactor"),
    OptimizerNames.GALORE_ADAMW_LAYERWISE: _galore("GaLoreAdamW", is_layerwise=True),
    OptimizerNames.GALORE_ADAMW_8BIT_LAYERWISE: _galore("GaLoreAdamW8bit", is_layerwise=True),
    OptimizerNames.GALORE_ADAFACTOR_LAYERWISE: _galore("GaLoreAdafactor", is_layerwise=True),
    OptimizerNames.APOLLO_ADAMW: _apollo(),
    OptimizerNames.APOLLO_ADAMW_LAYERWISE: _apollo(is_layerwise=True),
    OptimizerNames.LOMO: OptimizerEntry(("lomo_optim:Lomo",), _lomo_keywords, package="lomo-optim"),
    OptimizerNames.ADALOMO: OptimizerEntry(("lomo_optim:AdaLomo",), _lomo_keywords, package="lomo-optim"),
    OptimizerNames.GROKADAMW: OptimizerEntry(
        ("grokadamw:GrokAdamW",),
        _grokadamw_keywords,
        dict.fromkeys(("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping"), float),
        "grokadamw",
    ),
    OptimizerNames.SCHEDULE_FREE_RADAM: _schedule_free("RAdamScheduleFree", "schedulefree>=1.4.0"),
    OptimizerNames.SCHEDULE_FREE_ADAMW: _schedule_free("AdamWScheduleFree"),
    OptimizerNames.SCHEDULE_FREE_SGD: _schedule_free("SGDScheduleFree"),
    OptimizerNames.STABLE_ADAMW: OptimizerEntry(
        ("optimi:StableAdamW",),
        _stable_adamw_keywords,
        {"decouple_lr": truth, "max_lr": float, "kahan_sum": truth},
        "torch-optimi",
    ),
}
