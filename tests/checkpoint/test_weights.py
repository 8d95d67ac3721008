from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import littrainer
from littrainer.checkpoint import weights
from littrainer.checkpoint.weights import (
    has_adapters,
    load_weights,
    read_weights,
    write_weights,
)
from tests.scenarios.models import (
    NoisyClassifier,
    VectorClassifier,
    tiny_bert_classifier,
    tiny_bert_for_masked_tokens,
    tiny_bert_tagger,
    tiny_gpt2,
    tiny_lora_tagger,
)
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


class TiedClassifier(VectorClassifier):
    """A layer with two names."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.also_head = self.head


class CountingSteps(nn.Module):
    """A module with an extra state."""

    def __init__(self, steps: Any = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.steps = steps

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


class OddTensors(nn.Module):
    """Non-contiguous, empty and scalar tensors, and a saved and an unsaved buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scattered = nn.Parameter(torch.rand(2, 3).T)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.rand(()))
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("not_kept", torch.arange(3), persistent=False)


def weights_of(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def all_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


# ---- Saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [VectorClassifier, NoisyClassifier, OddTensors, tiny_gpt2, tiny_bert_classifier])
@pytest.mark.parametrize("max_shard_size", [None, 250], ids=["one file", "shards"])
def test_weights_survive_a_save_and_load(tmp_path: Path, build: Any, max_shard_size: int | None) -> None:
    saved, model = build(), build()
    write_weights(saved, tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (
        max_shard_size is not None and build is not OddTensors
    )
    load_weights(model, tmp_path, to_resume=True)
    assert all_equal(weights_of(model), weights_of(saved))


@pytest.mark.parametrize("build", [VectorClassifier, NoisyClassifier])
def test_a_plain_modules_file_equals_that_of_transformers(tmp_path: Path, build: Any) -> None:
    model = build()
    args = quiet_arguments(tmp_path / "theirs", transformers.TrainingArguments)
    transformers.Trainer(model=model, args=args).save_model()
    write_weights(model, tmp_path / "ours")
    names = [tmp_path / side / "model.safetensors" for side in ("ours", "theirs")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_transformers_reads_shards_of_a_plain_module(tmp_path: Path) -> None:
    from transformers.trainer_utils import load_sharded_checkpoint

    saved, model = VectorClassifier(), VectorClassifier()
    write_weights(saved, tmp_path, max_shard_size=200)
    load_sharded_checkpoint(model, str(tmp_path))
    assert all_equal(weights_of(model), weights_of(saved))
    write_weights(saved, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_tied_layers_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    saved, model = TiedClassifier(), TiedClassifier()
    write_weights(saved, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "head.weight" in stored and "also_head.weight" not in stored
    load_weights(model, tmp_path, to_resume=True)
    assert all_equal(weights_of(model), weights_of(saved))
    assert model.also_head.weight is model.head.weight
    # Copies share no memory, and either name can be loaded.
    write_weights(saved, tmp_path, weights_of(saved))
    assert set(load_file(tmp_path / "model.safetensors")) == set(stored)
    stored = {name.replace("head", "also_head"): value for name, value in stored.items()}
    save_file(stored, tmp_path / "model.safetensors")
    again = TiedClassifier()
    load_weights(again, tmp_path, to_resume=True)
    assert all_equal(weights_of(again), weights_of(saved))


class SharingBuffers(VectorClassifier):
    """Buffers that share memory with a parameter or within themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", self.head.weight.data.view(-1))
        self.register_buffer("turned", self.head.weight.data.t())
        self.register_buffer("ones", torch.ones(1).expand(5))


@pytest.mark.parametrize("max_shard_size", [None, 100])
def test_tensors_that_share_memory_survive_a_save_and_load(tmp_path: Path, max_shard_size: int | None) -> None:
    model, other = SharingBuffers(), SharingBuffers()
    model.ones.data = torch.full((1,), 3.0).expand(5)
    write_weights(model, tmp_path, max_shard_size=max_shard_size)
    assert set(read_weights(tmp_path)) == set(model.state_dict())
    load_weights(other, tmp_path, to_resume=True)
    assert all_equal(weights_of(other), weights_of(model))
    assert other.flat.data_ptr() == other.head.weight.data_ptr()


def test_extra_state_survives_a_save_and_load_or_is_refused_if_unsafe(tmp_path: Path) -> None:
    write_weights(CountingSteps(7), tmp_path)
    model = CountingSteps()
    load_weights(model, tmp_path, to_resume=True)
    assert model.steps == 7
    write_weights(nn.Linear(2, 2), tmp_path)
    assert not (tmp_path / "littrainer_extra_state.pt").exists()
    with pytest.raises(ValueError, match=r"extra_state\.pt would hold something .*Path.*get_extra_state"):
        write_weights(CountingSteps(Path("a path")), tmp_path)


def test_weights_without_values_are_an_error_that_names_them(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = VectorClassifier()
    with pytest.raises(ValueError, match=r"inner\.weight, .* have no values \(device meta\)"):
        write_weights(model, tmp_path)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compile_layer(model: VectorClassifier) -> nn.Module:
    model.inner = compiled(model.inner)
    return model


@pytest.mark.parametrize("wrap", [compiled, compile_layer])
def test_weights_of_compiled_and_plain_models_are_exchangeable(
    tmp_path: Path, wrap: Callable[[Any], nn.Module]
) -> None:
    saved, plain, again = VectorClassifier(), VectorClassifier(), wrap(VectorClassifier())
    expected = weights_of(saved)
    write_weights(wrap(saved), tmp_path / "compiled")
    load_weights(plain, tmp_path / "compiled", to_resume=True)
    assert all_equal(weights_of(plain), expected)
    write_weights(plain, tmp_path / "plain")
    load_weights(again, tmp_path / "plain", to_resume=True)
    assert [*map(torch.Tensor.tolist, again.state_dict().values())] == [*map(torch.Tensor.tolist, expected.values())]


def test_the_prefix_of_distributed_training_is_removed(tmp_path: Path) -> None:
    saved, model = VectorClassifier(), VectorClassifier()
    torch.save({f"module.{name}": value for name, value in weights_of(saved).items()}, tmp_path / "pytorch_model.bin")
    load_weights(model, tmp_path, to_resume=True)
    assert all_equal(weights_of(model), weights_of(saved))


def test_names_of_an_earlier_release_are_converted(tmp_path: Path) -> None:
    """transformers 5.3.0 writes BERT's LayerNorm as gamma and beta."""
    saved, model = tiny_bert_classifier(), tiny_bert_classifier()
    for parameter in saved.parameters():
        nn.init.normal_(parameter)
    earlier = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights_of(saved).items()
    }
    save_file(earlier, tmp_path / "model.safetensors")
    generator = torch.random.get_rng_state()
    load_weights(model, tmp_path, to_resume=True)
    assert all_equal(weights_of(model), weights_of(saved))
    assert torch.equal(torch.random.get_rng_state(), generator)


def test_weights_that_transformers_merges_are_loaded_without_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mixture of experts is one tensor in memory and one for each expert in a file."""
    for name in ("modeling_utils", "distributed.tensor_parallel"):
        # The level makes transformers warn of modules that are not sharded.
        caplog.set_level("WARNING", f"transformers.{name}")
    config = transformers.MixtralConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    saved, model = transformers.MixtralForCausalLM(config), transformers.MixtralForCausalLM(config)
    write_weights(saved, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) != set(saved.state_dict())
    transformers.utils.logging.add_handler(caplog.handler)
    load_weights(model, tmp_path, to_resume=True)
    transformers.utils.logging.remove_handler(caplog.handler)
    assert all_equal(weights_of(model), weights_of(saved)) and caplog.records == []


# ---- Formats ---------------------------------------------------------------------------------------------------------

WEIGHTS = {"a": torch.arange(3.0), "b.c": torch.ones(2, 2, dtype=torch.bfloat16)}
SHARDS = {"a": "1-of-2", "b.c": "2-of-2"}


FORMATS = {"model.safetensors": save_file, "pytorch_model.bin": torch.save}


def write_shards(folder: Path, name: str = "model.safetensors") -> None:
    suffix = Path(name).suffix
    for key, stem in SHARDS.items():
        FORMATS[name]({key: WEIGHTS[key]}, folder / f"{stem}{suffix}")
    weight_map = {key: f"{stem}{suffix}" for key, stem in SHARDS.items()}
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("in_shards", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_read_from_each_format(tmp_path: Path, name: str, in_shards: bool) -> None:
    if in_shards:
        write_shards(tmp_path, name)
    else:
        FORMATS[name](WEIGHTS, tmp_path / name)
    weights = read_weights(tmp_path)
    assert set(weights) == set(WEIGHTS)
    for key, tensor in WEIGHTS.items():
        assert weights[key].dtype == tensor.dtype and torch.equal(weights[key], tensor)


def test_a_folder_without_weights_is_an_error_with_the_expected_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.safetensors, pytorch_model\.bin, model\.safetensors\.index\.json"):
        read_weights(tmp_path)


def test_a_hub_download_with_links_to_blobs_is_loaded(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--a--b" / "snapshots" / "0", tmp_path / "models--a--b" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    save_file(WEIGHTS, blobs / "1234")
    (folder / "x.safetensors").symlink_to(blobs / "1234")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert set(read_weights(folder)) == set(WEIGHTS)


# ---- Models that override loading ------------------------------------------------------------------------------------


class Renaming(VectorClassifier):
    """A model that loads its head under an earlier name."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        for part in ("weight", "bias"):
            state_dict[f"head.{part}"] = state_dict.pop(f"earlier.{part}")
        return super().load_state_dict(state_dict, strict, assign)


class ByHook(VectorClassifier):
    """A model that loads a head of any size through torch's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.resize)

    @staticmethod
    def resize(model: Any, state_dict: Any, *_: Any) -> None:
        model.head = nn.Linear(8, len(state_dict["head.bias"]))


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("head.", "earlier."): value for name, value in state.items()}


def add_two_outputs(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "head.weight": torch.rand(5, 8), "head.bias": torch.rand(5)}


@pytest.mark.parametrize(
    ("build", "stored_as", "back"),
    [
        (Renaming, renamed, lambda state: {name.replace("earlier.", "head."): v for name, v in state.items()}),
        (ByHook, add_two_outputs, dict),
    ],
    ids=["renaming", "by a hook"],
)
@pytest.mark.parametrize("to_resume", [True, False])
def test_an_overridden_load_state_dict_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, build: Any, stored_as: Any, back: Any, to_resume: bool
) -> None:
    model = build()
    stored = stored_as({name: torch.rand(value.shape) for name, value in weights_of(model).items()})
    save_file(stored, tmp_path / "model.safetensors")
    load_weights(model, tmp_path, to_resume=to_resume)
    assert all_equal(weights_of(model), back(stored)) and caplog.records == []


# ---- Weights of another model ----------------------------------------------------------------------------------------


def test_other_names_are_refused_on_a_resume_and_else_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = weights_of(VectorClassifier())
    state["surplus"] = state.pop("head.bias")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"no weights for head\.bias; the model does not have surplus"):
        load_weights(VectorClassifier(), tmp_path, to_resume=True)
    model = VectorClassifier()
    load_weights(model, tmp_path)
    assert torch.equal(model.head.weight, state["head.weight"])
    assert "no weights for head.bias; the model does not have surplus" in caplog.text


def test_missing_frozen_weights_and_buffers_are_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, model = VectorClassifier(), VectorClassifier()
    model.inner.requires_grad_(False)
    model.register_buffer("added_since", torch.ones(1))
    state = {name: value for name, value in weights_of(saved).items() if not name.startswith("inner.")}
    save_file(state, tmp_path / "model.safetensors")
    load_weights(model, tmp_path, to_resume=True)
    assert torch.equal(model.head.weight, saved.head.weight)
    assert "no weights for added_since, inner.weight, inner.bias" in caplog.text


@pytest.mark.parametrize("to_resume", [True, False])
def test_weights_of_another_shape_are_an_error_that_names_them(tmp_path: Path, to_resume: bool) -> None:
    write_weights(VectorClassifier(hidden=5), tmp_path)
    with pytest.raises(RuntimeError, match=r"inner\.weight is \(5, 6\) in the checkpoint and \(8, 6\) in the model"):
        load_weights(VectorClassifier(), tmp_path, to_resume=to_resume)


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_bert_for_masked_tokens])
def test_tied_weights_of_transformers_are_loaded_without_a_warning_and_stay_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, build: Callable[[], Any]
) -> None:
    saved, model = build(), build()
    saved.save_pretrained(tmp_path)
    load_weights(model, tmp_path, to_resume=True)
    assert caplog.records == []
    assert all_equal(weights_of(model), weights_of(saved))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_best_checkpoint_without_weights_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class SavesElsewhere(littrainer.Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            Path(output_dir).mkdir(exist_ok=True)
            (Path(output_dir) / "model.of-its-own").touch()

    evaluating_and_saving = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    trainer = quiet_trainer(
        tmp_path, kind=SavesElsewhere, max_steps=2, load_best_model_at_end=True, **evaluating_and_saving
    )
    assert trainer.train().global_step == 2
    assert "has no weights to load: the model keeps those of the last step" in caplog.text


def randomize(model: Any) -> Any:
    """Randomize a model's trainable weights."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def trained_weights(model: Any) -> dict[str, Any]:
    return {name: parameter.tolist() for name, parameter in model.named_parameters() if parameter.requires_grad}


def add_adapter(model: Any) -> Any:
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"]))
    return model


def test_an_adapter_of_a_transformers_model_survives_a_save_and_load(tmp_path: Path) -> None:
    saved, model = randomize(add_adapter(tiny_bert_tagger())), add_adapter(tiny_bert_tagger())
    assert has_adapters(model) and not has_adapters(tiny_bert_tagger())
    write_weights(saved, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    load_weights(model, tmp_path, to_resume=True)
    assert trained_weights(model) == trained_weights(saved)


def lora_of_rank_3() -> Any:
    adapter = peft.LoraConfig(r=3, target_modules=["query"], modules_to_save=["classifier"], task_type="TOKEN_CLS")
    return peft.get_peft_model(tiny_bert_tagger(), adapter)


def three_adapters() -> Any:
    model = tiny_lora_tagger(("trained", "other"))
    model.add_adapter("more", model.peft_config["other"])
    return model


# Written model or None, loading model, and error.
OTHER_ADAPTERS: list[tuple[Any, Callable[[], Any], str]] = [
    (
        lora_of_rank_3,
        tiny_lora_tagger,
        r"adapter 'default': .*lora_A\.weight is \(3, 16\) in the checkpoint and \(2, 16\)",
    ),
    (
        lambda: add_adapter(tiny_bert_tagger(num_hidden_layers=2)),
        lambda: add_adapter(tiny_bert_tagger()),
        r"the model does not have .*layer\.1",
    ),
    (
        lambda: tiny_lora_tagger(("default", "other")),
        tiny_lora_tagger,
        "holds an adapter named 'other', and the model has 'default'",
    ),
    (lambda: tiny_lora_tagger(("other", "more")), three_adapters, "adapter 'trained': not in the checkpoint"),
    (None, tiny_lora_tagger, r"No adapter in .*adapter_model\.safetensors or adapter_model\.bin"),
]


@pytest.mark.parametrize(("written", "model", "message"), OTHER_ADAPTERS)
def test_mismatched_adapters_are_refused(tmp_path: Path, written: Any, model: Any, message: str) -> None:
    if written is not None:
        write_weights(written(), tmp_path)
    with pytest.raises((RuntimeError, ValueError), match=message):
        load_weights(model(), tmp_path, to_resume=True)


def test_full_weights_are_loaded_into_a_model_with_an_adapter(tmp_path: Path) -> None:
    """An overridden `_save` may write full weights."""
    saved, model = randomize(tiny_lora_tagger()), tiny_lora_tagger()
    save_file({name: value.contiguous() for name, value in saved.state_dict().items()}, tmp_path / "model.safetensors")
    load_weights(model, tmp_path, to_resume=True)
    assert trained_weights(model) == trained_weights(saved)


def encoded_prompt() -> Any:
    """Return a model with p-tuning, whose encoder PEFT does not save."""
    adapter = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    return peft.get_peft_model(tiny_gpt2(), adapter)


def unfrozen_by_hand() -> Any:
    model = tiny_lora_tagger()
    model.base_model.model.bert.embeddings.LayerNorm.requires_grad_(True)
    return model


@pytest.mark.parametrize("build", [encoded_prompt, unfrozen_by_hand])
def test_trained_parameters_that_peft_does_not_save_survive_a_save_and_load(tmp_path: Path, build: Any) -> None:
    saved, model = randomize(build()), build()
    write_weights(saved, tmp_path)
    load_weights(model, tmp_path, to_resume=True)
    assert trained_weights(model) == trained_weights(saved)


def test_trained_parameters_in_no_file_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    randomize(encoded_prompt()).save_pretrained(tmp_path)
    load_weights(encoded_prompt(), tmp_path, to_resume=True)
    assert "does not hold prompt_encoder.default.embedding.weight" in caplog.text


def test_a_scripts_progress_bar_hook_is_restored_after_overlapping_saves() -> None:
    def hook(factory: Any, args: Any, keywords: Any) -> Any:
        return factory(*args, **keywords)

    from transformers.utils import logging as theirs

    before = theirs.set_tqdm_hook(hook)
    try:
        first, second = (weights._hide_progress_bar() for _ in range(2))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
    finally:
        assert theirs.set_tqdm_hook(before) is hook
