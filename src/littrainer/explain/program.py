"""The plain Lightning program that arguments are equivalent to, as Python text.

It needs neither transformers' Trainer nor this package, but for optimizers and schedules that only this package has.
What a program of this size leaves out is listed in its first lines, by argument.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from littrainer.arguments.choices import IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from littrainer.arguments.destinations import lightning_precision
from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.explain.heading import NO_SOURCE, Source, further_keywords, heading, is_carried_out, watches_the_loss
from littrainer.explain.printed_values import code, plain_part
from littrainer.explain.schedule_code import METRIC_SCHEDULE, schedule_constants, schedule_function

# Argument of the DataLoader -> argument it comes from.
LOADER_KEYWORDS = {
    "num_workers": "dataloader_num_workers",
    "persistent_workers": "dataloader_persistent_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "multiprocessing_context": "dataloader_multiprocessing_context",
    "in_order": "dataloader_in_order",
}


class NotPrintable(ValueError):
    """These arguments have no plain program; the message says which, and what to do."""


def program(
    args: TrainingArguments, source: Source = NO_SOURCE, origin: str = "these arguments", trainer: Any = None
) -> str:
    """The text of the program.

    Parameters:
        args: the arguments.
        source: its model and data.
        origin: whose arguments they are, for the first line.
        trainer: the Trainer of a script, whose objects the first lines name.

    Raises:
        NotPrintable: the optimizer needs the parameters of a particular model, or the schedule has no plain form.
        ValueError: the source cannot be read.
    """
    if args.lr_scheduler_type == SchedulerType.GREEDY:
        raise NotPrintable(
            "lr_scheduler_type='greedy' is a schedule that torch does not have, so a plain program cannot print it; "
            "leave out --as-code for the explanation, or choose another schedule."
        )
    parts = [
        heading(args, source, origin, trainer),
        _imports(args, source),
        "\n".join([*_constants(args), *schedule_constants(args)]),
        *("\n".join(part) for part in (*_model_and_data(source), _optimizer(args), schedule_function(args))),
        "\n".join(_module(args, source)),
        "\n".join(_main(args)),
    ]
    return f"{parts[0]}\n\n{parts[1]}\n\n{parts[2]}\n\n\n" + "\n\n\n".join(parts[3:]) + "\n"


def _imports(args: TrainingArguments, source: Source) -> str:
    lines = ["import math", "from typing import Any", "", "import lightning.pytorch as pl", "import torch"]
    lines += ["from torch import nn", "from torch.utils.data import DataLoader"]
    optimizer_class, _ = _optimizer_class_and_keywords(args)
    if not optimizer_class.__module__.startswith("torch."):
        lines.append(f"from {optimizer_class.__module__} import {optimizer_class.__name__}")
    for named, alias in ((source.model, "model_factory"), (source.data, "data_factory")):
        if named is not None and ":" in named:
            module, _, name = named.partition(":")
            lines.append(f"from {module} import {name} as {alias}")
    return "\n".join(lines)


def _constants(args: TrainingArguments) -> list[str]:
    return [
        f"OUTPUT_DIR = {code(args.output_dir)}",
        f"LEARNING_RATE = {args.learning_rate!r}",
        f"WEIGHT_DECAY = {args.weight_decay!r}",
        f"ACCUMULATION = {args.gradient_accumulation_steps!r}",
        f"MAX_GRAD_NORM = {args.max_grad_norm!r}",
    ]


def _model_and_data(source: Source) -> list[list[str]]:
    if source.model is None:
        model = _STAND_IN_MODEL
    elif ":" in source.model:
        model = ["def make_model() -> nn.Module:", "    return model_factory()"]
    else:
        model = _model_from_config(source.model)
    if source.data is not None:
        data = ["def make_rows() -> Any:", "    return data_factory()"]
    elif source.model is not None and ":" not in source.model:
        data = _rows_for_config(source.model)
    else:
        data = _STAND_IN_ROWS
    return [model, data]


_STAND_IN_MODEL = """\
class StandIn(nn.Module):
    # In the place of your model.
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.norm(torch.relu(self.inner(x))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_model() -> nn.Module:
    return StandIn()""".splitlines()

_STAND_IN_ROWS = """\
def make_rows() -> Any:
    # Random rows in the place of your data.
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 8, generator=generator)
    return [{"x": row, "labels": int(row[:3].argmax())} for row in rows]""".splitlines()


def _read_config(path: str) -> dict[str, Any]:
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(
            f"--model {path!r} is neither MODULE:NAME nor a transformers configuration that can be read; give one."
        ) from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ValueError(f"--model {path!r} names no architectures; give a configuration saved with its model.")
    return config


def _model_from_config(path: str) -> list[str]:
    class_name = _read_config(path)["architectures"][0]
    folder = str(Path(path).resolve())
    return [
        "def make_model() -> nn.Module:",
        f"    from transformers import AutoConfig, {class_name}",
        "",
        f"    return {class_name}(AutoConfig.from_pretrained({code(folder)}))",
    ]


def _rows_for_config(path: str) -> list[str]:
    config = _read_config(path)
    vocabulary, kind = config.get("vocab_size", 2), config["architectures"][0]
    if kind.endswith("ForSequenceClassification"):
        labels = f"int(row[0]) % {len(config.get('id2label', {})) or 2}"
    elif kind.endswith("ForTokenClassification"):
        labels = f"row % {len(config.get('id2label', {})) or 2}"
    else:
        labels = "row"
    return [
        "def make_rows() -> Any:",
        "    # Random rows in the place of your data.",
        "    generator = torch.Generator().manual_seed(0)",
        f"    rows = torch.randint({vocabulary}, (64, 8), generator=generator)",
        f'    return [{{"input_ids": row, "labels": {labels}}} for row in rows]',
    ]


def _optimizer_class_and_keywords(args: TrainingArguments) -> tuple[Any, dict[str, Any]]:
    from torch.optim import Optimizer

    from littrainer.optim.optimizers import OPTIMIZERS, optimizer_class_and_keywords

    entry = OPTIMIZERS[OptimizerNames(args.optim)]
    name = OptimizerNames(args.optim).value
    refusal = NotPrintable(
        f"optim={name!r} is made from the parameters of a particular model, which a printed program does not have; "
        "leave out --as-code for the explanation, or choose an optimizer of torch."
    )
    if entry.projects:
        raise refusal
    optimizer_class, keywords = optimizer_class_and_keywords(args)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)) or "model" in keywords:
        raise refusal
    return optimizer_class, keywords


def _optimizer(args: TrainingArguments) -> list[str]:
    optimizer_class, keywords = _optimizer_class_and_keywords(args)
    name = optimizer_class.__name__
    shown = f"torch.optim.{name}" if optimizer_class.__module__.startswith("torch.") else name
    settings = "".join(f", {key}={'LEARNING_RATE' if key == 'lr' else code(value)}" for key, value in keywords.items())
    return [
        "def is_decayed(model: nn.Module, name: str) -> bool:",
        '    path = name.split(".")',
        '    layers = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]',
        '    words = ("bias", "layernorm", "rmsnorm", "_norm.", ".norm.")',
        "    return not any(isinstance(layer, nn.LayerNorm) for layer in layers) and not any(",
        '        word in f".{name.lower()}." for word in words',
        "    )",
        "",
        "",
        "def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:",
        "    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]",
        "    groups = [",
        '        {"params": [w for name, w in trained if is_decayed(model, name)], "weight_decay": WEIGHT_DECAY},',
        '        {"params": [w for name, w in trained if not is_decayed(model, name)], "weight_decay": 0.0},',
        "    ]",
        f"    return {shown}(groups{settings})",
    ]


def _loss_lines(args: TrainingArguments, source: Source) -> list[str]:
    if not args.label_smoothing_factor:
        return ['        return outputs["loss"] if isinstance(outputs, dict) else outputs[0]']
    from_config = source.model is not None and ":" not in source.model
    shifts = from_config and _read_config(str(source.model))["architectures"][0].endswith("ForCausalLM")
    cut = ["        logits, labels = logits[..., :-1, :], labels[..., 1:]"] if shifts else []
    return [
        '        logits, labels = outputs["logits"], batch["labels"]',
        *cut,
        "        return nn.functional.cross_entropy(",
        f"            logits.flatten(0, -2), labels.flatten(), label_smoothing={args.label_smoothing_factor!r}",
        "        )",
    ]


def _module(args: TrainingArguments, source: Source) -> list[str]:
    follows_metric = args.lr_scheduler_type == METRIC_SCHEDULE
    interval = '"epoch", "monitor": "eval_loss", "strict": False' if follows_metric else '"step"'
    return [
        "class Training(pl.LightningModule):",
        "    def __init__(self, model: nn.Module, total_steps: int) -> None:",
        "        super().__init__()",
        "        self.model, self.total_steps = model, total_steps",
        "",
        "    def on_train_start(self) -> None:",
        "        # Lightning leaves layers in the mode it finds, and from_pretrained gives evaluation mode.",
        "        self.model.train()",
        "",
        "    def loss(self, batch: dict[str, Any]) -> torch.Tensor:",
        "        outputs = self.model(**batch)",
        *_loss_lines(args, source),
        "",
        "    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:",
        "        loss = self.loss(batch)",
        '        self.log("train_loss", loss, prog_bar=True)',
        "        return loss",
        "",
        "    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:",
        '        self.log("eval_loss", self.loss(batch), prog_bar=True)',
        "",
        "    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:",
        "        # Lightning's gradient_clip_val refuses a fused optimizer in mixed precision.",
        "        if MAX_GRAD_NORM > 0:",
        "            nn.utils.clip_grad_norm_(self.parameters(), MAX_GRAD_NORM)",
        "",
        "    def configure_optimizers(self) -> Any:",
        "        optimizer = make_optimizer(self.model)",
        "        schedule = make_schedule(optimizer, self.total_steps)",
        f'        return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": schedule, "interval": {interval}}}}}',
    ]


def _loader(args: TrainingArguments, is_training: bool) -> str:
    usual = {"num_workers": 0, "persistent_workers": False, "in_order": True}
    batch_size = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
    settings: dict[str, Any] = {"batch_size": batch_size}
    if is_training:
        settings["shuffle"] = args.train_sampling_strategy != "sequential"
    if args.dataloader_drop_last:
        settings["drop_last"] = True
    values = {keyword: getattr(args, name) for keyword, name in LOADER_KEYWORDS.items()}
    settings.update({keyword: value for keyword, value in values.items() if value != usual.get(keyword)})
    if args.dataloader_pin_memory and args.device.type != "cpu":
        settings["pin_memory"] = True
    return f"DataLoader(make_rows(), {', '.join(f'{key}={code(value)}' for key, value in settings.items())})"


def _main(args: TrainingArguments) -> list[str]:
    evaluates = args.eval_strategy != IntervalStrategy.NO or args.eval_on_start
    lines = ["def main() -> pl.Trainer:", f"    pl.seed_everything({args.seed}, workers=True)"]
    if args.tf32 is not None:
        lines.append(f"    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = {args.tf32}")
    lines += [f"    train_loader = {_loader(args, is_training=True)}"]
    if evaluates:
        lines += ["    # Put your evaluation data here.", f"    eval_loader = {_loader(args, is_training=False)}"]
    lines += [f"    total_steps = {_total_steps(args)}", "    model = make_model()", *_model_changes(args)]
    lines += [*_checkpoints(args), "    trainer = pl.Trainer("]
    lines += [f"        {name}={value}," for name, value in _trainer_keywords(args).items()]
    lines += ["    )", "    module = Training(model, total_steps)"]
    if args.eval_on_start:
        lines.append("    trainer.validate(module, eval_loader, verbose=False)")
    lines.append(f"    trainer.fit(module, train_loader{', eval_loader' if _evaluates_in_fit(args) else ''})")
    if args.load_best_model_at_end:
        lines += [
            "    best = torch.load(checkpoints.best_model_path, weights_only=True)",
            '    module.load_state_dict(best["state_dict"])',
        ]
    return [
        *lines,
        '    loss = float(trainer.callback_metrics["train_loss"])',
        '    print(f"{trainer.global_step} optimizer steps, last loss {loss:.4f}")',
        "    return trainer",
        "",
        "",
        'if __name__ == "__main__":',
        "    trainer = main()",
    ]


def _evaluates_in_fit(args: TrainingArguments) -> bool:
    return args.eval_strategy != IntervalStrategy.NO


def _total_steps(args: TrainingArguments) -> str:
    if args.max_steps > 0:
        return str(args.max_steps)
    return f"math.ceil({args.num_train_epochs!r} * math.ceil(len(train_loader) / ACCUMULATION))"


def _model_changes(args: TrainingArguments) -> list[str]:
    lines = []
    if args.activation_checkpointing:
        lines += [
            '    if hasattr(model, "gradient_checkpointing_enable"):',
            f"        model.gradient_checkpointing_enable({code(plain_part(args.activation_checkpointing_kwargs))})",
        ]
    lines += ['    if hasattr(model, "config"):', f"        model.config.use_cache = {args.use_cache}"]
    if args.torch_compile:
        lines.append(
            f"    model.compile(backend={code(args.torch_compile_backend)}, mode={code(args.torch_compile_mode)})"
        )
    return lines


def _steps(interval: float | None) -> str:
    """Optimizer steps of an interval, as code: below 1 it is a share of all steps."""
    if interval is None or interval >= 1:
        return str(int(interval or 1))
    return f"math.ceil(total_steps * {interval!r})"


def _saves(args: TrainingArguments) -> bool:
    return args.save_strategy != SaveStrategy.NO and (args.save_strategy != SaveStrategy.STEPS or args.save_steps > 0)


def _checkpoints(args: TrainingArguments) -> list[str]:
    if not _saves(args):
        return []
    settings = ["dirpath=OUTPUT_DIR"]
    if args.save_strategy == SaveStrategy.STEPS:
        settings.append(f"every_n_train_steps={_steps(args.save_steps)}")
    keeps_all = args.save_total_limit is None or args.save_total_limit <= 0
    if args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST:
        highest = args.greater_is_better and watches_the_loss(args)
        settings += ['monitor="eval_loss"', f"mode={code('max' if highest else 'min')}"]
    elif not keeps_all:
        settings += ['monitor="step"', 'mode="max"']
    settings.append(f"save_top_k={-1 if keeps_all else args.save_total_limit}")
    return [f"    checkpoints = pl.callbacks.ModelCheckpoint({', '.join(settings)})"]


def _trainer_keywords(args: TrainingArguments) -> dict[str, str]:
    keywords = {
        "accelerator": code("gpu" if args.device.type == "cuda" else args.device.type),
        "devices": "1",
        "precision": code(lightning_precision(args)),
        "max_steps": "total_steps",
        "max_epochs": "-1",
        "accumulate_grad_batches": "ACCUMULATION",
        "enable_progress_bar": repr(not args.disable_tqdm),
        "enable_model_summary": "False",
        "num_sanity_val_steps": "0",
        "enable_checkpointing": repr(_saves(args)),
    }
    if args.full_determinism:
        keywords["deterministic"] = "True"
    if _saves(args):
        keywords["callbacks"] = "[checkpoints]"
    if args.logging_strategy == IntervalStrategy.NO:
        keywords["logger"] = "False"
    else:
        by_steps = args.logging_strategy == IntervalStrategy.STEPS
        keywords["logger"] = "pl.loggers.CSVLogger(OUTPUT_DIR)"
        keywords["log_every_n_steps"] = _steps(args.logging_steps) if by_steps else "len(train_loader)"
    if args.eval_strategy == IntervalStrategy.STEPS:
        keywords["val_check_interval"] = f"ACCUMULATION * {_steps(args.eval_steps)}"
        keywords["check_val_every_n_epoch"] = "None"
    if is_carried_out(args, "lightning"):
        keywords.update({name: code(value) for name, value in further_keywords(args).items()})
    return keywords
