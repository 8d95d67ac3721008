from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.data.packing import PackedCollator
from littrainer.data.resume.rng import get_rng_states
from littrainer.loop.packed_attention import check_packing
from tests.fidelity.first_difference import first_difference
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, token_rows
from tests.scenarios.models import VOCABULARY_SIZE, tiny_bert_tagger, tiny_gpt2, tiny_llama
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def make_model(name: str, **settings: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY_SIZE, **settings)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def tiny_mamba() -> Any:
    return make_model("Mamba", hidden_size=16, num_hidden_layers=1, state_size=4)


def tiny_bloom() -> Any:
    return make_model("Bloom", hidden_size=16, n_layer=1, n_head=2)


def tiny_jamba() -> Any:
    """Return a model with attention and recurrent layers."""
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2, "num_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_mamba_kernels": False}
    return make_model("Jamba", hidden_size=16, intermediate_size=16, **layers, **heads)


def llama_with_full_mask() -> Any:
    """Return a model whose mask does not separate documents."""
    model = tiny_llama()
    forward = model.forward

    def mask_all(input_ids: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(input_ids, attention_mask=torch.ones_like(input_ids), position_ids=position_ids, **kwargs)

    model.forward = mask_all
    return model


def gpt2_with_row_positions() -> Any:
    """Return a model that separates documents, and embeds positions in the row."""
    model = tiny_gpt2()
    embed = model.transformer.wpe.forward
    model.transformer.wpe.forward = lambda positions: embed(torch.arange(positions.shape[-1])[None])
    return model


# Model, further arguments, and part of the error.
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (tiny_mamba, {}, "MambaForCausalLM.forward takes no position_ids"),
    (tiny_jamba, {}, "JambaForCausalLM has recurrent layers"),
    (tiny_bloom, {}, "BloomForCausalLM.forward takes no position_ids"),
    (tiny_bert_tagger, {}, "BertForTokenClassification is no causal language model"),
    (llama_with_full_mask, {}, "a document sees those before it in its row.*max_tokens_per_batch"),
    (tiny_llama, {"use_cache": True}, "a document sees those before it in its row.*Set use_cache=False"),
    (gpt2_with_row_positions, {}, "does not count positions from 0 in each document"),
]


@pytest.mark.parametrize(("make", "changes", "message"), REFUSED)
def test_a_model_that_mixes_documents_is_refused_with_the_reason(
    tmp_path: Path, make: Any, changes: dict[str, Any], message: str
) -> None:
    parameters = {"train_dataset": Rows(language_rows(8)), "data_collator": pad_tokens}
    trainer = quiet_trainer(tmp_path, make(), trainer_kwargs=parameters, pack_to_length=20, max_steps=1, **changes)
    with pytest.raises(ValueError, match=f"pack_to_length=20 is not possible: .*{message}"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_check_restores_generators_and_modes(tmp_path: Path) -> None:
    class Loader:
        collate_fn = PackedCollator(pad_tokens, 20, 0)

    model = tiny_gpt2(use_cache=False).train()
    model.transformer.h[0].eval()
    modes, states = [part.training for part in model.modules()], get_rng_states()
    check_packing(quiet_arguments(tmp_path, pack_to_length=20), model, model, Loader())
    assert [part.training for part in model.modules()] == modes
    assert first_difference(states, get_rng_states()) is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_other_collators_are_not_checked(tmp_path: Path) -> None:
    parameters = {"train_dataset": Rows(token_rows(4)), "data_collator": pad_tokens}
    trainer = quiet_trainer(tmp_path, tiny_mamba(), trainer_kwargs=parameters)
    check_packing(trainer.args, trainer.model, trainer.model, trainer.get_train_dataloader())
