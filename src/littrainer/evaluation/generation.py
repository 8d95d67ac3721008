"""Predictions that a model generates: which settings hold, and the loss, tokens and labels of one batch."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from littrainer.arguments.did_you_mean import nearest_name
from littrainer.arguments.fields import GenerationConfig
from littrainer.errors.lazy_isinstance import is_a
from littrainer.errors.notes import kind_of

if TYPE_CHECKING:
    from littrainer.seq2seq import Seq2SeqTrainer

logger = logging.getLogger(__name__)

CONFIG_FILE = "generation_config.json"
# Keywords of a call that None leaves to the arguments and to the model's generation config.
UNSET_BY_NONE = ("max_length", "num_beams")
# Made from the labels by collators; to generate after them would be to continue the answer.
MADE_FROM_LABELS = ("decoder_input_ids", "decoder_attention_mask")


class HasTokens(Protocol):
    """What has a model, and a tokenizer or processor beside it; a Trainer is one."""

    model: Any
    processing_class: Any


def is_asked_for(args: Any) -> bool:
    """Whether arguments ask for predictions that are generated."""
    return bool(getattr(args, "predict_with_generate", False)) and not args.prediction_loss_only


def prepare(trainer: Seq2SeqTrainer, model: nn.Module) -> None:
    """Give a model the generation config that the arguments name, and refuse one that cannot generate if it has to.

    Raises:
        OSError, ValueError, TypeError: there is no valid generation config, or the model cannot generate.
    """
    wanted = getattr(trainer.args, "generation_config", None)
    if wanted is not None:
        config: Any = load_config(wanted)
        model.generation_config = config
    if getattr(trainer.args, "predict_with_generate", False) and not trainer._own_methods("prediction_step"):
        check_that_it_can_generate(model)


def check_that_it_can_generate(model: nn.Module) -> None:
    """Refuse a model that cannot generate.

    Raises:
        ValueError: it has no method `generate`, or no generation config.
    """
    for name in ("generate", "generation_config"):
        if getattr(model, name, None) is None:
            raise ValueError(
                f"predict_with_generate=True needs a model that can generate, and {type(model).__name__} has no "
                f"`{name}`. Load it with a language modeling head (AutoModelForSeq2SeqLM, AutoModelForCausalLM), or "
                "leave predict_with_generate off."
            )


# ---- Settings --------------------------------------------------------------------------------------------------------


def load_config(wanted: Any) -> Any:
    """A generation config of its own, validated, from what the argument `generation_config` names.

    Parameters:
        wanted: a generation config, a file, a folder with a generation_config.json, or a model id.

    Raises:
        OSError: there is none to be read.
        ValueError: its settings contradict each other.
        TypeError: it is none of these.
    """
    if isinstance(wanted, (str, os.PathLike)):
        named = f"generation_config={os.fspath(wanted)!r}"
        config = _read(wanted, named)
    elif isinstance(wanted, GenerationConfig):
        named, config = "generation_config", copy.deepcopy(wanted)
    else:
        raise TypeError(
            f"generation_config is {kind_of(wanted)}; give a GenerationConfig, the path of a file or of a "
            "folder that holds one, or a model id."
        )
    try:
        # The same check happens when the model is saved, after the training.
        config.validate(strict=True)
    except ValueError as error:
        raise ValueError(
            f"{named} is not valid, and the model could not be saved with it; change it. {error}"
        ) from error
    return config


def _read(wanted: str | os.PathLike[str], named: str) -> Any:
    try:
        known: Any = importlib.import_module("transformers").GenerationConfig
    except ImportError as error:
        raise ImportError(f"{named} is read by transformers, which is not installed: pip install transformers.") from (
            error
        )
    path = Path(wanted)
    if path.is_dir() and not (path / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"{named} is a folder without a {CONFIG_FILE}; write one with save_pretrained().")
    place = (path.parent, path.name) if path.is_file() else (wanted, None)
    try:
        return known.from_pretrained(*place)
    except OSError as error:
        raise OSError(
            f"{named} cannot be read: {error} Give a GenerationConfig, the path of a file or of a folder that holds "
            "one, or a model id."
        ) from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{named} is not valid: {error}") from error


def keywords_of_a_call(args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `generate` for one `evaluate` or `predict`.

    Parameters:
        args: arguments whose length and beams fill in what the call leaves open.
        given: the keywords of the call; None leaves a keyword open.

    Raises:
        ValueError: the call asks for no beam, or for a part of one.
    """
    keywords = dict(given)
    wanted = keywords.get("num_beams")
    if wanted is not None and not (isinstance(wanted, Integral) and int(wanted) > 0):
        raise ValueError(
            f"num_beams={wanted!r} in a call of evaluate() or predict() is out of range; give a whole number from 1."
        )
    length, beams = (getattr(args, name, None) for name in ("generation_max_length", "generation_num_beams"))
    if length is not None and keywords.get("max_length") is None and keywords.get("max_new_tokens") is None:
        keywords["max_length"] = length
    if beams is not None and keywords.get("num_beams") is None:
        keywords["num_beams"] = beams
    return keywords


@contextlib.contextmanager
def keywords_for_a_call(trainer: Seq2SeqTrainer, given: Mapping[str, Any]) -> Iterator[None]:
    """Have `prediction_step` generate with these keywords until the end of the block.

    A short last batch counts in the loss as a full one meanwhile, as it does in transformers' Seq2SeqTrainer.
    """
    if not getattr(trainer.args, "predict_with_generate", False):
        _say_that_keywords_have_no_effect(given)
    before = trainer._gen_kwargs, trainer.gather_function
    trainer._gen_kwargs = keywords_of_a_call(trainer.args, given)
    trainer.gather_function = trainer.accelerator.gather_each_sample
    try:
        yield
    finally:
        trainer._gen_kwargs, trainer.gather_function = before


def _say_that_keywords_have_no_effect(given: Mapping[str, Any]) -> None:
    idle = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    if idle:
        logger.warning("%s: without effect, since predict_with_generate is not set.", idle)


def generates_in_step(model: nn.Module, world_size: int) -> bool:
    """Whether all processes have to take the same number of generation steps: `synced_gpus` of `generate`.

    They have to where parameters are sharded, since each forward pass then gathers them from all processes. With plain
    data parallelism each process generates on its own.

    Parameters:
        world_size: number of processes.
    """
    if world_size == 1:
        return False
    by_deepspeed = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return by_deepspeed or any(is_a(module, "sharded module") for module in model.modules())


# ---- One batch -------------------------------------------------------------------------------------------------------


def generate_batch(
    trainer: Seq2SeqTrainer, model: nn.Module, inputs: dict[str, Any], gen_kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Loss, generated token ids and labels of one batch; without labels there are neither loss nor labels.

    Tokens and labels are padded to the longest that the model's generation config allows.

    Parameters:
        model: what computes the loss; `trainer.model` generates.
        gen_kwargs: keywords of `generate`.
    """
    check_that_it_can_generate(trainer.model)
    inputs = trainer._prepare_inputs(inputs)
    labels = inputs.get("labels")
    tokens = generated_tokens(trainer.model, inputs, gen_kwargs, trainer.args.world_size)
    tokens, padded_labels = padded_alike(trainer.model, tokens, labels, trainer._pad_tensors_to_max_len)
    if labels is None:
        return None, tokens, None
    with torch.no_grad(), trainer.compute_loss_context_manager():
        outputs = model(**inputs)
        if trainer.label_smoother is not None:
            loss = trainer.label_smoother(outputs, labels)
        else:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss.detach().mean(), tokens, padded_labels


def generated_tokens(
    model: Any, inputs: Mapping[str, Any], gen_kwargs: Mapping[str, Any], world_size: int
) -> torch.Tensor:
    """The token ids that a model generates from a batch.

    Parameters:
        gen_kwargs: keywords of `generate`.
        world_size: number of processes.

    Raises:
        ValueError: `generate` does not take one of the keywords.
    """
    keywords = {name: value for name, value in gen_kwargs.items() if value is not None or name not in UNSET_BY_NONE}
    keywords.setdefault("synced_gpus", generates_in_step(model, world_size))
    return _generated(model, inputs_to_generate_from(inputs), keywords)


def padded_alike(
    model: Any,
    tokens: torch.Tensor,
    labels: torch.Tensor | None,
    pad: Callable[[torch.Tensor, int], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Generated tokens and labels, each padded to the length that the model's generation config allows.

    Parameters:
        pad: fills rows of token ids up to a length.
    """
    lengths = _longest(model.generation_config)
    padded_tokens = _padded_to_first_longer(pad, tokens, lengths)
    return padded_tokens, None if labels is None else _padded_to_first_longer(pad, labels, lengths)


def inputs_to_generate_from(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without what would give the answer away: decoder inputs that were made from the labels."""
    labels, decoder_inputs = inputs.get("labels"), inputs.get("decoder_input_ids")
    left_out: tuple[str, ...] = ("labels",) if labels is None else ()
    if labels is not None and decoder_inputs is not None and labels.shape == decoder_inputs.shape:
        left_out = MADE_FROM_LABELS
    return {name: value for name, value in inputs.items() if name not in left_out}


def _generated(model: Any, inputs: dict[str, Any], keywords: dict[str, Any]) -> torch.Tensor:
    try:
        return model.generate(**inputs, **keywords)
    except ValueError as error:
        unknown = [name for name in keywords if repr(name) in str(error)]
        known = [*inspect.signature(model.generate).parameters, *model.generation_config.to_dict()]
        nearest = {name: nearest_name(name, known) for name in unknown if name not in known}
        if not nearest:
            raise
        hints = [f"{name!r}" + (f" (did you mean {near!r}?)" if near else "") for name, near in nearest.items()]
        raise ValueError(
            f"{type(model).__name__}.generate does not take {', '.join(hints)}: correct the keywords given to "
            "evaluate() or predict()."
        ) from error


def _longest(config: Any) -> tuple[int, ...]:
    """The lengths that outputs may be padded to: `max_length`, and `max_new_tokens` with the first token."""
    # Settings read from a model's configuration would be read again for each batch.
    if config._from_model_config:
        config._from_model_config = False
    config.update(**config._get_default_generation_params(), defaults_only=True)
    return tuple(
        length
        for length in (config.max_length, None if config.max_new_tokens is None else config.max_new_tokens + 1)
        if length is not None
    )


def _padded_to_first_longer(
    pad: Callable[[torch.Tensor, int], torch.Tensor], tokens: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    longer = next((length for length in lengths if tokens.shape[-1] < length), None)
    return tokens if longer is None else pad(tokens, longer)


def padded(tokens: torch.Tensor, length: int, padding: int) -> torch.Tensor:
    """Rows of token ids filled up to `length`, on the right."""
    wide = tokens.new_full((tokens.shape[0], length), padding)
    wide[:, : tokens.shape[-1]] = tokens
    return wide


def padding_token(trainer: HasTokens) -> int:
    """The token id that fills up shorter outputs: the tokenizer's, or else the model's.

    Raises:
        ValueError: neither has one.
    """
    processing = trainer.processing_class
    if hasattr(processing, "pad_token_id"):
        # Decoder-only models' tokenizers often have none, and end their sequences with something.
        ids = [processing.pad_token_id, getattr(processing, "eos_token_id", None)]
        place = f"{type(processing).__name__}.pad_token_id"
    else:
        ids = [getattr(getattr(trainer.model, "config", None), "pad_token_id", None)]
        place = "model.config.pad_token_id"
    found = next((token for token in ids if token is not None), None)
    if found is None:
        raise ValueError(f"Generated outputs differ in length and there is nothing to pad them with: set {place}.")
    return found
