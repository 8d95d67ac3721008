"""Losses over chunks of tokens, compared with those of the logits of a whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from littrainer import Trainer, TrainerCallback
from littrainer.loop import chunked_loss
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows
from tests.scenarios.models import (
    VOCABULARY_SIZE,
    VectorClassifier,
    tiny_bart,
    tiny_bert_for_masked_tokens,
    tiny_gpt2,
    tiny_llama,
    tiny_t5,
)
from tests.scenarios.trainers import quiet_trainer, warnings_logged

TOLERANCE = 1e-6
# A head over several chunks even for the few tokens of these tests.
CHUNK_TOKENS = 3


def tiny_gemma() -> Any:
    """A Gemma 2 whose soft cap is small enough to change all logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Gemma2ForCausalLM(
        Gemma2Config(vocab_size=VOCABULARY_SIZE, **sizes, **heads, final_logit_softcapping=0.5, pad_token_id=0)
    )


def llama_with_adapted_head() -> Any:
    import peft

    return peft.get_peft_model(
        tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    )


def llama_with_an_inactive_adapter() -> Any:
    import peft

    model = llama_with_adapted_head()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    return model.train().requires_grad_(True)


def llama_with_a_hooked_head() -> Any:
    model = tiny_llama()
    model.lm_head.weight.register_hook(lambda gradient: gradient * 0.1)
    return model


def tiny_mixtral() -> Any:
    """A mixture of experts with an auxiliary loss, which smoothed losses leave out."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY_SIZE, router_aux_loss_coef=1.0, **sizes, **heads))


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": tiny_llama,
    "tied Llama": lambda: tiny_llama(tie_word_embeddings=True),
    "Llama with LoRA at its head": llama_with_adapted_head,
    "Llama with an inactive adapter": llama_with_an_inactive_adapter,
    "Llama with a hooked head": llama_with_a_hooked_head,
    "Mixtral with an auxiliary loss": tiny_mixtral,
    "Gemma 2 with a soft cap": tiny_gemma,
    "GPT-2": lambda: tiny_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "BERT for masked tokens": lambda: tiny_bert_for_masked_tokens(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
}


class GradientRecorder(TrainerCallback):
    """A callback that keeps the gradients of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parameters = kwargs["model"].named_parameters()
        self.steps.append({name: value.grad.clone() for name, value in parameters if value.grad is not None})


def make_trainer(folder: Path, model: Any, **changes: Any) -> Trainer:
    keywords = {
        "train_dataset": Rows(changes.pop("rows", language_rows(20))),
        "eval_dataset": Rows(language_rows(7)),
        "data_collator": pad_tokens,
        **changes.pop("trainer_kwargs", {}),
    }
    settings = {"max_steps": 3, "logging_strategy": "steps", "logging_steps": 1, **changes}
    return quiet_trainer(folder, model, trainer_kwargs=keywords, **settings)


def train(folder: Path, make: Callable[[], Any], **changes: Any) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    recorder = GradientRecorder()
    trainer = make_trainer(folder, make(), trainer_kwargs={"callbacks": [recorder]}, **changes)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], recorder.steps


def compare(folder: Path, make: Callable[[], Any], tolerance: float = TOLERANCE, **changes: Any) -> None:
    losses, gradients = train(folder, make, **changes)
    chunked_losses, chunked_gradients = train(folder, make, chunked_loss=True, **changes)
    assert len(losses) == 3 and losses == pytest.approx(chunked_losses, abs=tolerance)
    for step, chunked_step in zip(gradients, chunked_gradients, strict=True):
        assert step.keys() == chunked_step.keys()
        for name, gradient in step.items():
            assert torch.allclose(gradient, chunked_step[name], rtol=tolerance, atol=tolerance), name


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "MIN_CHUNK_TOKENS", CHUNK_TOKENS)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_all_logits(tmp_path: Path, name: str, smoothing: float) -> None:
    compare(tmp_path, MODELS[name], gradient_accumulation_steps=2, label_smoothing_factor=smoothing)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_normalization": "exact", "gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True, "neftune_noise_alpha": 5.0},
        {"auto_micro_batch": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
)
def test_further_arguments_change_both_losses_alike(tmp_path: Path, changes: dict[str, Any]) -> None:
    compare(tmp_path, tiny_llama, **changes)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(tiny_t5, dropout_rate=0.0, initializer_factor=0.1),
        functools.partial(tiny_bart, dropout=0.0, init_std=0.1),
    ],
)
def test_an_encoder_decoder_is_trained_too(tmp_path: Path, make: Callable[[], Any]) -> None:
    compare(tmp_path, make, loss_normalization="exact", gradient_accumulation_steps=2)


def test_half_precision_rounds_differently_only(tmp_path: Path) -> None:
    compare(tmp_path, tiny_llama, tolerance=1e-2, bf16=True)


@pytest.mark.parametrize(
    ("name", "first", "changes"),
    [
        ("Llama", 0, {}),
        ("BERT for masked tokens", 4, {"label_smoothing_factor": 0.1, "logging_nan_inf_filter": False}),
    ],
)
def test_a_micro_batch_without_labels_adds_nothing(
    tmp_path: Path, name: str, first: int, changes: dict[str, Any]
) -> None:
    rows = language_rows(24)
    for row in rows[first:12]:
        row["labels"] = [-100] * len(row["labels"])
    order = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2}
    compare(tmp_path, MODELS[name], rows=rows, **order, **changes)


class LargestLogits(TorchDispatchMode):
    """A mode that records the largest number of tokens whose logits are computed at once."""

    tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A transposed weight has as many columns.
        for value in [] if func is torch.ops.aten.t.default else tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.shape[-1:] == (VOCABULARY_SIZE,):
                self.tokens = max(self.tokens, value.numel() // VOCABULARY_SIZE)
        return result


def test_no_step_and_no_evaluation_computes_the_logits_of_more_than_a_chunk(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, tiny_llama(), chunked_loss=True, eval_strategy="steps", eval_steps=1, max_steps=2)
    with LargestLogits() as largest:
        trainer.train()
    assert 0 < largest.tokens <= max(CHUNK_TOKENS, 4 * 9 // chunked_loss.DEFAULT_CHUNKS + 1)


def test_an_evaluation_with_metrics_has_logits_and_says_so_once(tmp_path: Path) -> None:
    chunked_loss.warn_once.cache_clear()
    torch.manual_seed(0)
    shapes = []
    trainer = make_trainer(tmp_path, tiny_llama(), chunked_loss=True)
    without_metrics = trainer.evaluate()["eval_loss"]
    trainer.compute_metrics = lambda prediction: shapes.append(prediction.predictions.shape) or {"score": 1.0}
    with warnings_logged("chunked_loss=True: evaluations with") as texts:
        metrics = [trainer.evaluate() for _ in range(2)]
    assert len(texts) == 1 and shapes[0] == shapes[1] and shapes[0][-1] == VOCABULARY_SIZE
    assert metrics[0]["eval_loss"] == pytest.approx(without_metrics, abs=TOLERANCE)
    trainer.train()
    assert trainer.predict(trainer.eval_dataset).predictions.shape == shapes[0]


class ReadsLogits(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        outputs["logits"].argmax(-1)
        return (loss, outputs) if return_outputs else loss


class OwnLoss(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with self.compute_loss_context_manager():
            outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class CallsOurs(Trainer):
    """A Trainer whose methods reach the Trainer's `compute_loss` by another name, or by themselves."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self.weigh(*args, **kwargs)

    def weigh(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        loss, outputs = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
        return loss, outputs["logits"], inputs["labels"]


def test_own_methods_that_call_the_trainers_compute_loss_get_logits_in_evaluations(tmp_path: Path) -> None:
    shapes = []
    metrics = {"compute_metrics": lambda prediction: shapes.append(prediction.predictions.shape) or {}}
    keywords = {**metrics, "train_dataset": Rows(language_rows(8)), "eval_dataset": Rows(language_rows(7))}
    trainer = quiet_trainer(
        tmp_path,
        tiny_llama(),
        kind=CallsOurs,
        trainer_kwargs={**keywords, "data_collator": pad_tokens},
        chunked_loss=True,
        max_steps=1,
    )
    trainer.train()
    trainer.evaluate()
    assert shapes[0][-1] == VOCABULARY_SIZE


class SplitsTheHead(Trainer):
    def get_tp_size(self) -> int:
        return 2


class RescaledLlama(torch.nn.Module):
    """A model whose loss changes logits by operators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama()

    def get_output_embeddings(self) -> Any:
        return self.inner.lm_head

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        logits = self.inner(input_ids, attention_mask).logits.to(dtype=torch.float32)
        logits = 1 + 0.5 * -logits - 3
        assert logits.size()[:2] == labels.shape
        return {"loss": torch.nn.functional.cross_entropy(logits.reshape((-1, logits.size(-1))), labels.view(-1))}


def test_operators_on_logits_are_applied_to_each_chunk(tmp_path: Path) -> None:
    compare(tmp_path, RescaledLlama)


@pytest.mark.parametrize(
    "operate",
    [
        lambda logits: logits[..., :-1, :],
        lambda logits: logits**2,
        lambda logits: 1 - logits,
        lambda logits: logits > 0,
        lambda logits: logits @ torch.ones(VOCABULARY_SIZE),
        lambda logits: logits.view(-1),
        lambda logits: logits.flatten(),
    ],
)
def test_an_operation_that_chunks_cannot_do_is_refused_by_the_models_name(operate: Callable[..., Any]) -> None:
    head = chunked_loss._Head(torch.nn.Linear(4, VOCABULARY_SIZE), torch.nn.Linear, "LlamaForCausalLM")
    with pytest.raises((TypeError, AttributeError), match="chunked_loss=True: the loss of LlamaForCausalLM takes"):
        operate(head.defer(torch.ones(2, 3, 4)))


def test_micro_batches_share_their_compiled_graphs(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    graphs = []
    for steps in (2, 5):
        torch.compiler.reset()
        counters.clear()
        rows = [{**row, "input_ids": [5] * 6, "labels": [5] * 6} for row in language_rows(20)]
        settings = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": steps}
        make_trainer(tmp_path, tiny_llama(), rows=rows, chunked_loss=True, **settings).train()
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[1]


class ScaledLlama(torch.nn.Module):
    """A model whose loss multiplies logits by a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def get_output_embeddings(self) -> Any:
        return self.inner.lm_head

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        logits = self.inner(input_ids, attention_mask).logits * self.scale
        return {"loss": torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY_SIZE), labels.view(-1))}


@pytest.mark.parametrize(
    ("model", "keywords", "kind", "message"),
    [
        (VectorClassifier, {}, Trainer, "linear head, and VectorClassifier has none: .* gives NoneType"),
        (tiny_llama, {"compute_loss_func": lambda *args, **kwargs: None}, Trainer, "compute_loss_func, which takes"),
        (tiny_llama, {"args": {"use_liger_kernel": True}}, Trainer, "use_liger_kernel, which computes no logits"),
        (tiny_llama, {}, SplitsTheHead, "FSDP version 1 or tensor parallelism, which split the head"),
        (tiny_llama, {}, OwnLoss, "a compute_loss that does not call the Trainer's"),
        (tiny_llama, {}, ReadsLogits, r"the loss of LlamaForCausalLM takes logits\.argmax"),
        (ScaledLlama, {}, Trainer, "the loss of ScaledLlama takes mul of logits and a tensor"),
    ],
)
def test_a_loss_that_needs_logits_is_refused(
    tmp_path: Path, model: Any, keywords: dict[str, Any], kind: type[Trainer], message: str
) -> None:
    data = {"train_dataset": Rows(language_rows(8)), "data_collator": pad_tokens}
    made, settings = model(), keywords.pop("args", {})
    with pytest.raises((ValueError, TypeError, AttributeError), match=f"chunked_loss=True.*{message}"):
        quiet_trainer(
            tmp_path, made, kind=kind, trainer_kwargs={**data, **keywords}, chunked_loss=True, max_steps=1, **settings
        ).train()
    # The head is as before.
    assert all(type(module).__module__.startswith(("torch.", "transformers.", "tests.")) for module in made.modules())
