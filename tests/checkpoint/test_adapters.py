from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from littrainer.checkpoint.adapters import adapter_folders, carries_adapters
from littrainer.checkpoint.weights import load_weights, write_weights
from tests.checkpoint.malicious import Creates
from tests.scenarios.models import VectorClassifier, tiny_bert_tagger, tiny_gpt2, tiny_lora_tagger
from tests.scenarios.trainers import quiet_trainer


def trained(model: Any) -> Any:
    """A model whose trained weights are no longer the ones that adapters begin with."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def trained_weights(model: Any) -> dict[str, Any]:
    return {name: parameter.tolist() for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_only_adapters_are_written_and_come_back(tmp_path: Path) -> None:
    saved, model = trained(tiny_lora_tagger()), tiny_lora_tagger()
    write_weights(saved, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert trained_weights(model) != trained_weights(saved)
    load_weights(model, tmp_path, to_resume=True)
    assert trained_weights(model) == trained_weights(saved)
    assert model.training


def test_several_adapters_come_back_each_from_its_folder(tmp_path: Path) -> None:
    names = ("first", "second")
    saved, model = trained(tiny_lora_tagger(names)), tiny_lora_tagger(names)
    write_weights(saved, tmp_path)
    assert set(adapter_folders(tmp_path)) == set(names)
    load_weights(model, tmp_path, to_resume=True)
    assert trained_weights(model) == trained_weights(saved)
    assert model.active_adapters == ["first"]


def carrying(model: Any) -> Any:
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"]))
    return model


def test_an_adapter_that_a_model_of_transformers_carries_comes_back(tmp_path: Path) -> None:
    saved, model = trained(carrying(tiny_bert_tagger())), carrying(tiny_bert_tagger())
    assert carries_adapters(model) and not carries_adapters(tiny_bert_tagger())
    write_weights(saved, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    load_weights(model, tmp_path, to_resume=True)
    assert trained_weights(model) == trained_weights(saved)


def test_a_carried_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    write_weights(carrying(tiny_bert_tagger(num_hidden_layers=2)), tmp_path)
    with pytest.raises(RuntimeError, match=r"weights for .*layer\.1.*, which the model does not have"):
        load_weights(carrying(tiny_bert_tagger()), tmp_path, to_resume=True)


def test_an_adapter_of_another_rank_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    adapter = peft.LoraConfig(r=3, target_modules=["query"], modules_to_save=["classifier"], task_type="TOKEN_CLS")
    write_weights(peft.get_peft_model(tiny_bert_tagger(), adapter), tmp_path)
    with pytest.raises(
        RuntimeError, match=r"adapter 'default': .*lora_A\.weight has shape \(3, 16\), the model's \(2, 16\)"
    ):
        load_weights(tiny_lora_tagger(), tmp_path, to_resume=True)


def test_an_adapter_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    write_weights(tiny_lora_tagger(), tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    state.pop("base_model.model.classifier.weight")
    save_file(state, tmp_path / "adapter_model.safetensors")
    with pytest.raises(RuntimeError, match=r"no weights for base_model\.model\.classifier\.weight"):
        load_weights(tiny_lora_tagger(), tmp_path, to_resume=True)


def test_an_adapter_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    write_weights(tiny_lora_tagger(("default", "other")), tmp_path)
    with pytest.raises(ValueError, match=r"holds an adapter named 'other', and the model has 'default'"):
        load_weights(tiny_lora_tagger(), tmp_path, to_resume=True)


def test_a_trained_adapter_that_the_checkpoint_does_not_have_is_named(tmp_path: Path) -> None:
    write_weights(tiny_lora_tagger(("other", "more")), tmp_path)
    model = tiny_lora_tagger(("trained", "other"))
    model.add_adapter("more", model.peft_config["other"])
    with pytest.raises(RuntimeError, match=r"adapter 'trained': not in the checkpoint"):
        load_weights(model, tmp_path, to_resume=True)


def test_a_folder_without_an_adapter_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No adapter in .*adapter_model\.safetensors or adapter_model\.bin"):
        load_weights(tiny_lora_tagger(), tmp_path, to_resume=True)


def test_a_pickled_adapter_cannot_run_code(tmp_path: Path) -> None:
    write_weights(tiny_lora_tagger(), tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({"a": Creates(tmp_path / "was-run")}, tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.bin is refused"):
        load_weights(tiny_lora_tagger(), tmp_path, to_resume=True)
    assert not (tmp_path / "was-run").exists()


def test_a_checkpoint_of_an_adapter_is_refused_for_a_model_without_one(tmp_path: Path) -> None:
    write_weights(tiny_lora_tagger(), tmp_path)
    with pytest.raises(ValueError, match="No model weights in"):
        load_weights(tiny_bert_tagger(), tmp_path, to_resume=True)


def test_whole_weights_are_read_into_a_model_with_an_adapter_too(tmp_path: Path) -> None:
    """As a Trainer that was broken off writes them, whose `_save` a user has overridden."""
    saved, model = trained(tiny_lora_tagger()), tiny_lora_tagger()
    save_file({name: value.contiguous() for name, value in saved.state_dict().items()}, tmp_path / "model.safetensors")
    load_weights(model, tmp_path, to_resume=True)
    assert trained_weights(model) == trained_weights(saved)


def test_the_model_of_a_trainer_is_not_changed_by_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    quiet_trainer(tmp_path, VectorClassifier(hidden=5), max_steps=1, save_strategy="steps", save_steps=1).train()
    model = VectorClassifier()
    before = trained_weights(model)
    with pytest.raises(RuntimeError, match=r"not those of this model: shapes differ: inner\.weight is \(5, 6\)"):
        quiet_trainer(tmp_path, model, max_steps=2).train(resume_from_checkpoint=True)
    assert trained_weights(model) == before


def encoded_prompt() -> Any:
    """P-tuning trains an encoder, and PEFT saves only the prompt that it computes."""
    adapter = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    return peft.get_peft_model(tiny_gpt2(), adapter)


def unfrozen_by_hand() -> Any:
    model = tiny_lora_tagger()
    model.base_model.model.bert.embeddings.LayerNorm.requires_grad_(True)
    return model


@pytest.mark.parametrize("build", [encoded_prompt, unfrozen_by_hand])
def test_what_is_trained_and_left_out_by_peft_comes_back(tmp_path: Path, build: Any) -> None:
    saved, model = trained(build()), build()
    write_weights(saved, tmp_path)
    load_weights(model, tmp_path, to_resume=True)
    assert trained_weights(model) == trained_weights(saved)


def test_what_is_trained_and_in_no_file_is_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(encoded_prompt()).save_pretrained(tmp_path)
    load_weights(encoded_prompt(), tmp_path, to_resume=True)
    assert "does not hold prompt_encoder.default.embedding.weight" in caplog.text


def test_where_peft_saves_everything_there_is_no_further_file(tmp_path: Path) -> None:
    write_weights(tiny_lora_tagger(("default", "other")), tmp_path)
    assert not list(tmp_path.rglob("littrainer_*"))


def test_left_out_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    write_weights(unfrozen_by_hand(), tmp_path)
    torch.save({"elsewhere": torch.ones(1)}, tmp_path / "littrainer_trained_beside_adapters.pt")
    with pytest.raises(RuntimeError, match=r"elsewhere in littrainer_trained_beside_adapters\.pt is not the model's"):
        load_weights(unfrozen_by_hand(), tmp_path, to_resume=True)
