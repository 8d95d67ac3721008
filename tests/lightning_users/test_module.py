from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner import Tuner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from littrainer import TransformersModule, set_seed
from littrainer.optim.parameter_groups import decayed_parameter_names
from tests.lightning_users.fitting import ROWS, fitted, loader, module_of, trainer_for
from tests.scenarios.collators import pad_tokens, pad_translations
from tests.scenarios.data import language_rows, token_rows, translation_rows, vector_rows
from tests.scenarios.metrics import accuracy, shapes_and_sums
from tests.scenarios.models import (
    CLASSES,
    LogitsOnly,
    NoisyClassifier,
    VectorClassifier,
    tiny_bert_classifier,
    tiny_gpt2,
    tiny_t5,
)

ADAMW = {"optim": "adamw_torch", "learning_rate": 0.01}


class Seen(pl.Callback):
    """Notes what there is to see of a training."""

    def __init__(self) -> None:
        self.learning_rates: list[float] = []
        self.losses: list[float] = []
        self.modes: set[bool] = set()
        self.gradients: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.modes |= {part.training for part in module.model.modules()}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.learning_rates.append(optimizer.param_groups[0]["lr"])

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        if gradients:
            self.gradients.append(torch.cat(gradients).clone())

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].item())


def test_a_model_that_comes_in_evaluation_mode_is_trained_in_training_mode() -> None:
    model = NoisyClassifier().eval()
    seen = Seen()
    fitted(module_of(model), val=loader(), callbacks=[seen], max_epochs=2)
    assert seen.modes == {True}


def test_parts_that_the_user_put_into_evaluation_mode_stay_in_it() -> None:
    model = tiny_bert_classifier().train()
    module = module_of(model)
    model.bert.eval()
    rows = loader(token_rows(4), 2, pad_tokens)
    modes: list[tuple[bool, bool]] = []

    class Modes(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            modes.append((model.bert.encoder.training, model.dropout.training))

    fitted(module, rows, rows, callbacks=[Modes()], max_epochs=2)
    assert modes == [(False, True)] * 4


class AroundBert(torch.nn.Module):
    """A model of one's own around one that is loaded, and so in evaluation mode, with a part that is to stay in it."""

    def __init__(self) -> None:
        super().__init__()
        self.bert, self.frozen = tiny_bert_classifier().eval(), torch.nn.Linear(2, 2).eval()

    def forward(self, **batch: Any) -> Any:
        return self.bert(**batch)


def lora_around_a_loaded_model() -> Any:
    import peft

    return peft.get_peft_model(tiny_bert_classifier().eval(), peft.LoraConfig(target_modules=["query"]))


@pytest.mark.parametrize("make", [AroundBert, lora_around_a_loaded_model])
def test_a_loaded_model_within_another_one_is_trained_in_training_mode(make: Any) -> None:
    model = make()
    fitted(module_of(model), loader(token_rows(2), 2, pad_tokens))
    assert {name for name, part in model.named_modules() if not part.training} <= {"frozen"}


def test_losses_are_read_from_the_device_where_they_are_shown_or_logged_and_nowhere_else() -> None:
    class Reads(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    def reads(micro_batches: int, **keywords: Any) -> int:
        module = module_of(args={"optim": "sgd", "max_grad_norm": 0})
        with Reads() as found:
            fitted(module, DataLoader([batch] * micro_batches, batch_size=None), log_every_n_steps=8, **keywords)
        return found.number

    batch = next(iter(loader()))
    assert reads(16) == reads(4)
    logger = DummyLogger()
    assert reads(16, logger=logger) - reads(7, logger=logger) == 2
    bar: Any = {"enable_progress_bar": True, "callbacks": [pl.callbacks.TQDMProgressBar()]}
    assert reads(16, **bar) > reads(4, **bar)


def test_the_schedule_is_as_long_as_the_run_of_the_lightning_trainer() -> None:
    seen = Seen()
    args = {"learning_rate": 0.5, "warmup_steps": 2, "lr_scheduler_type": "linear"}
    fitted(module_of(args=args), callbacks=[seen], max_epochs=2)
    assert seen.learning_rates == pytest.approx([0, 0.25, 0.5, 0.375, 0.25, 0.125])


def test_a_loader_without_a_length_needs_max_steps_and_the_error_says_so() -> None:
    batches = list(loader())
    with pytest.raises(ValueError, match=r"lr_scheduler_type='linear' ends with the training.*max_steps"):
        fitted(module_of(), (batch for batch in batches))
    with pytest.raises(ValueError, match=r"warmup_steps=0\.5 is a share.*max_steps"):
        fitted(module_of(args={"warmup_steps": 0.5}), (batch for batch in batches))
    trainer = fitted(module_of(args={"lr_scheduler_type": "constant"}), (batch for batch in batches))
    assert trainer.global_step == len(batches)


def test_a_schedule_that_follows_a_metric_steps_with_the_validation() -> None:
    args = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 100.0, "threshold_mode": "abs"},
        "learning_rate": 0.5,
    }
    seen = Seen()
    fitted(module_of(args=args), val=loader(), callbacks=[seen], max_epochs=3)
    assert seen.learning_rates[::3] == [0.5, 0.5, 0.25]


def test_norms_and_biases_are_not_decayed() -> None:
    module = module_of(args={"weight_decay": 0.1})
    fitted(module)
    with_decay, without = module.trainer.optimizers[0].param_groups
    own = {id(parameter) for name, parameter in module.named_parameters() if name in decayed_parameter_names(module)}
    assert {id(parameter) for parameter in with_decay["params"]} == own and with_decay["weight_decay"] == 0.1
    assert len(without["params"]) == 4 and without["weight_decay"] == 0


def test_a_given_optimizer_and_schedule_are_used() -> None:
    model = VectorClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2)
    seen = Seen()
    trainer = fitted(module_of(model, optimizers=(optimizer, schedule)), callbacks=[seen])
    assert trainer.optimizers == [optimizer] and seen.learning_rates == [0.0625, 0.0625, 0.125]


@pytest.mark.parametrize(
    ("clip", "args", "largest"),
    [(None, {}, 1.0), (None, {"max_grad_norm": 0.25}, 0.25), (0.125, {"max_grad_norm": 0.25}, 0.125)],
)
def test_gradients_are_clipped_by_the_lightning_trainer_or_else_by_max_grad_norm(
    clip: float | None, args: dict[str, Any], largest: float
) -> None:
    # Fused, in mixed precision: what Lightning's own clipping refuses.
    seen = Seen()
    rows = [{**row, "x": row["x"] * 100} for row in vector_rows(ROWS)]
    module = module_of(args={"optim": "adamw_torch_fused", **args})
    torch.nn.init.normal_(module.model.head.weight, std=50)
    fitted(module, loader(rows), callbacks=[seen], gradient_clip_val=clip, precision="bf16-mixed")
    assert max(gradient.norm() for gradient in seen.gradients) == pytest.approx(largest, rel=1e-3)


def test_zero_clips_nothing_and_values_are_clipped_where_lightning_says_so() -> None:
    rows = [{**row, "x": row["x"] * 100} for row in vector_rows(ROWS)]
    largest = []
    for keywords in ({"gradient_clip_val": 0}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}):
        seen, module = Seen(), module_of()
        torch.nn.init.normal_(module.model.head.weight, std=50)
        fitted(module, loader(rows), callbacks=[seen], **keywords)
        largest.append(max(gradient.abs().max().item() for gradient in seen.gradients))
    assert largest[0] > 2 and largest[1] == pytest.approx(0.01)


def test_losses_and_metrics_are_logged_under_the_names_a_lightning_user_expects() -> None:
    module = module_of(compute_metrics=lambda prediction: {"eval_right": accuracy(prediction)["accuracy"], "half": 0.5})
    trainer = fitted(module, val=loader())
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss", "val_right", "val_half"}
    (tested,) = trainer.test(module, loader(), verbose=False)
    assert set(tested) == {"test_loss", "test_right", "test_half"}


def test_the_validation_loss_is_the_mean_over_samples() -> None:
    module = module_of()
    (found,) = trainer_for().validate(module, loader(), verbose=False)
    everything = next(iter(loader(batch_size=ROWS)))
    with torch.no_grad():
        expected = module(**everything)["loss"].item()
    assert found["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_several_loaders_are_told_apart_by_name_or_by_number() -> None:
    metrics = {"accuracy": torchmetrics.Accuracy("multiclass", num_classes=CLASSES)}
    module = module_of(compute_metrics=metrics)
    few, many = loader(vector_rows(3, 1)), loader()
    alone = [trainer_for().validate(module, one, verbose=False)[0] for one in (few, many)]
    by_name = trainer_for().validate(module, {"few": few, "many": many}, verbose=False)[0]
    assert by_name == {
        f"val_{name}_{key.removeprefix('val_')}": value
        for name, found in zip(("few", "many"), alone, strict=True)
        for key, value in found.items()
    }
    by_number = trainer_for().validate(module, [few, many], verbose=False)[0]
    assert by_number["val_loss/dataloader_idx_1"] == alone[1]["val_loss"]
    assert alone[0]["val_accuracy"] != alone[1]["val_accuracy"]


@pytest.mark.parametrize("kind", ["metric", "collection", "dict"])
def test_metrics_of_torchmetrics_are_updated_batch_by_batch(kind: str) -> None:
    metric = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="micro")
    given: Any = {
        "metric": metric,
        "collection": torchmetrics.MetricCollection({"accuracy": metric}),
        "dict": {"accuracy": metric},
    }[kind]
    module = module_of(compute_metrics=given)
    fitted(module, val=loader(), max_epochs=2)
    (found,) = trainer_for().validate(module, loader(), verbose=False)
    (expected,) = trainer_for().validate(
        TransformersModule(module.model, compute_metrics=accuracy), loader(), verbose=False
    )
    name = "val_multiclass_accuracy" if kind == "metric" else "val_accuracy"
    assert found[name] == pytest.approx(expected["val_accuracy"])


def test_metric_functions_get_predictions_padded_and_what_the_arguments_include() -> None:
    args = {"include_for_metrics": ["inputs", "loss"]}
    model = tiny_bert_classifier()
    module = module_of(model, args, compute_metrics=shapes_and_sums)
    rows = token_rows(7)
    (found,) = trainer_for().validate(module, loader(rows, 3, pad_tokens), verbose=False)
    longest = max(len(row["input_ids"]) for row in rows)
    assert found["val_predictions_size"] == 7 * CLASSES and found["val_inputs_size"] == 7 * longest
    assert found["val_losses_size"] == 7


def test_logits_are_shaped_before_they_are_kept() -> None:
    module = module_of(
        compute_metrics=shapes_and_sums, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)
    )
    (found,) = trainer_for().validate(module, loader(), verbose=False)
    assert found["val_predictions_size"] == ROWS


def test_an_error_of_a_metric_function_says_where_it_happened() -> None:
    def broken(prediction: Any) -> dict[str, float]:
        raise KeyError("accuracy")

    with pytest.raises(KeyError) as raised:
        fitted(module_of(compute_metrics=broken), val=loader(), num_sanity_val_steps=0)
    assert "at optimizer step 3" in raised.value.__notes__[0] and "float32 (10, 3)" in raised.value.__notes__[0]


@pytest.mark.parametrize("weighting", ["samples", "labels"])
def test_the_loss_of_an_evaluation_can_be_weighted_exactly(weighting: str) -> None:
    model, rows = tiny_gpt2(), language_rows(5)
    found = {}
    for batch_size in (2, 5):
        module = module_of(model, {"eval_loss_weighting": weighting})
        (found[batch_size],) = trainer_for().validate(module, loader(rows, batch_size, pad_tokens), verbose=False)
    is_exact = found[2]["val_loss"] == pytest.approx(found[5]["val_loss"], rel=1e-6)
    assert is_exact is (weighting == "labels")


def test_predict_returns_logits_of_each_batch_without_labels_too() -> None:
    module = module_of()
    rows = [{"x": row["x"]} for row in vector_rows(ROWS)]
    predicted = trainer_for().predict(module, loader(rows))
    assert predicted is not None
    assert [tuple(one.shape) for one in predicted] == [(4, CLASSES), (4, CLASSES), (2, CLASSES)]
    labelled = trainer_for().predict(module, loader())
    assert labelled is not None
    torch.testing.assert_close(torch.cat(labelled), torch.cat(predicted), rtol=0, atol=0)


def test_predict_leaves_the_loss_out_where_the_model_returns_a_tuple() -> None:
    class GivesTuple(VectorClassifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            outputs = super().forward(x, labels)
            return tuple(outputs[name] for name in ("loss", "logits") if outputs.get(name) is not None)

    set_seed(0)
    predicted = trainer_for().predict(module_of(GivesTuple()), loader())
    expected = trainer_for().predict(module_of(), loader())
    assert predicted is not None and expected is not None
    torch.testing.assert_close(predicted, expected, rtol=0, atol=0)


def test_a_metric_is_no_part_of_the_module_and_keeps_nothing_of_an_evaluation() -> None:
    metric = torchmetrics.AUROC("multiclass", num_classes=CLASSES)
    module = module_of(compute_metrics=metric)
    (found,) = trainer_for().validate(module, loader(), verbose=False)
    assert "val_multiclass_auroc" in found and metric.preds == []
    assert module.compute_metrics is metric and [name for name, _ in module.named_children()] == ["model"]


def test_predictions_are_generated_where_the_arguments_say_so() -> None:
    model = tiny_t5()
    args = {"predict_with_generate": True, "generation_max_length": 5}
    rows = translation_rows(4)
    module = module_of(model, args, compute_metrics=shapes_and_sums)
    (predicted,) = trainer_for().predict(module, loader(rows, 4, pad_translations)) or []
    (batch,) = loader(rows, 4, pad_translations)
    expected = model.eval().generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_length=5)
    assert not predicted.is_floating_point()
    assert torch.equal(predicted[:, : expected.shape[1]], expected)
    (found,) = trainer_for().validate(module, loader(rows, 4, pad_translations), verbose=False)
    assert found["val_predictions_size"] == predicted.numel()
    module = module_of(model, args, generation_kwargs={"max_length": 3})
    (shorter,) = trainer_for().predict(module, loader(rows, 4, pad_translations)) or []
    assert not torch.equal(shorter, predicted)


def test_a_model_that_cannot_generate_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="VectorClassifier has no `generate`"):
        module_of(args={"predict_with_generate": True})


def test_label_smoothing_changes_the_loss_as_in_a_trainer() -> None:
    seen, smoothed = Seen(), Seen()
    fitted(module_of(), callbacks=[seen])
    fitted(module_of(args={"label_smoothing_factor": 0.3}), callbacks=[smoothed])
    batch = next(iter(loader()))
    module = module_of()
    surprise = -module(**batch)["logits"].log_softmax(-1)
    expected = 0.7 * surprise.gather(1, batch["labels"][:, None]).mean() + 0.3 * surprise.mean()
    assert smoothed.losses[0] == pytest.approx(expected.item(), rel=1e-6) and smoothed.losses[0] != seen.losses[0]


def test_a_loss_function_gets_the_number_of_items() -> None:
    numbers = []

    def summed(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
        numbers.append(float(num_items_in_batch))
        losses = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        return losses / num_items_in_batch

    fitted(module_of(LogitsOnly(), compute_loss_func=summed, args={"label_names": ["labels"]}))
    assert numbers == [4, 4, 2]


def test_noise_is_added_to_embeddings_for_the_length_of_a_training() -> None:
    losses = []
    for alpha in (None, 50.0):
        seen, model = Seen(), tiny_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        module = module_of(model, {"neftune_noise_alpha": alpha})
        fitted(module, loader(language_rows(4), 4, pad_tokens), callbacks=[seen])
        losses.append(seen.losses)
        assert not model.get_input_embeddings()._forward_hooks
    assert losses[0] != losses[1]


def test_activations_are_recomputed_where_the_arguments_say_so() -> None:
    model = tiny_gpt2()
    fitted(module_of(model, {"gradient_checkpointing": True}), loader(language_rows(4), 4, pad_tokens))
    assert model.is_gradient_checkpointing
    with pytest.raises(ValueError, match=r"activation_checkpointing_enable\(\)"):
        fitted(module_of(args={"gradient_checkpointing": True}))


def test_a_subclass_brings_a_loss_predictions_and_parameter_groups_of_its_own() -> None:
    class Own(TransformersModule):
        def compute_loss(self, inputs: dict[str, Any], num_items_in_window: Any = None) -> Any:
            loss, outputs = super().compute_loss(inputs, num_items_in_window)
            return loss * 0 + 7, outputs

        def prediction_outputs(self, inputs: dict[str, Any], wants_loss: bool = True) -> Any:
            loss, predictions, labels = super().prediction_outputs(inputs, wants_loss)
            return loss, predictions.softmax(-1), labels

        def optimizer_groups(self) -> list[dict[str, Any]]:
            return [{"params": list(self.model.head.parameters()), "lr": 0.25}]

    set_seed(0)
    module = Own(VectorClassifier(), {"lr_scheduler_type": "constant"})
    before = copy.deepcopy(module.model.state_dict())
    trainer = fitted(module)
    assert trainer.callback_metrics["train_loss"] == 7
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.25]
    assert torch.equal(before["inner.weight"], module.model.inner.weight)
    (first, *_) = trainer.predict(module, loader()) or []
    torch.testing.assert_close(first.sum(-1), torch.ones(4))


def test_modules_of_a_subclass_beside_the_model_are_trained_too() -> None:
    class WithHead(TransformersModule):
        def __init__(self) -> None:
            super().__init__(VectorClassifier(), ADAMW)
            self.factor = torch.nn.Parameter(torch.ones(()))

        def compute_loss(self, inputs: dict[str, Any], num_items_in_window: Any = None) -> Any:
            loss, outputs = super().compute_loss(inputs, num_items_in_window)
            return loss * self.factor, outputs

    module = WithHead()
    fitted(module)
    assert module.factor.item() != 1


def test_the_module_stands_in_for_its_model_in_a_loop_of_ones_own() -> None:
    module = module_of(args={"learning_rate": 0.25, "optim": "sgd"})
    optimizer, schedule = module.optimizer_and_schedule(num_training_steps=2)
    before = module(**next(iter(loader())))["loss"].item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for place, batch in enumerate(loader()):
            if place < 2:
                module.training_step(batch, place).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert module(**next(iter(loader())))["loss"].item() < before
    assert optimizer.param_groups[0]["lr"] == 0


def test_a_function_makes_the_model_once_and_when_it_is_needed() -> None:
    made = []

    def make() -> VectorClassifier:
        made.append(VectorClassifier())
        return made[-1]

    module = TransformersModule(make)
    assert module.model is None and not made
    trainer = fitted(module, val=loader())
    trainer.validate(module, loader(), verbose=False)
    assert made == [module.model]


def test_a_trained_module_can_be_copied_and_pickled() -> None:
    module = module_of(args={"neftune_noise_alpha": None}, compute_metrics=accuracy)
    copies: list[TransformersModule] = []

    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            copies.append(copy.deepcopy(module))

    trainer = fitted(module, val=loader(), callbacks=[Copies()])
    copies.append(pickle.loads(pickle.dumps(module)))
    assert all(one.model is not module.model for one in copies)
    expected = trainer.validate(module, loader(), verbose=False)
    assert [trainer_for().validate(one, loader(), verbose=False) for one in copies[-2:]] == [expected] * 2


def test_the_learning_rate_finder_sets_the_learning_rate_and_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of()
    monkeypatch.chdir(tmp_path)
    found = Tuner(trainer_for(max_epochs=20)).lr_find(module, loader(), num_training=40, update_attr=True)
    assert found is not None and found.suggestion() is not None
    assert module.args.learning_rate == module.learning_rate == found.suggestion()
    assert module.hparams["args"]["learning_rate"] == module.learning_rate


def test_a_batch_that_is_no_mapping_is_refused_with_what_to_do() -> None:
    pairs = torch.utils.data.TensorDataset(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
    with pytest.raises(TypeError, match=r"was handed a list as a batch.*default_data_collator"):
        fitted(module_of(), torch.utils.data.DataLoader(pairs, batch_size=2))
    for evaluate in (trainer_for().validate, trainer_for().predict):
        with pytest.raises(TypeError, match=r"was handed a list as a batch.*on_after_batch_transfer"):
            evaluate(module_of(), torch.utils.data.DataLoader(pairs, batch_size=2))


def test_batches_of_several_loaders_are_refused_with_what_to_do() -> None:
    loaders = {"a": loader(), "b": loader()}
    with pytest.raises(TypeError, match=r"batches of several loaders \(a, b\) as a batch.*on_after_batch_transfer"):
        fitted(module_of(), loaders)

    class Both(TransformersModule):
        def compute_loss(self, inputs: dict[str, Any], num_items_in_window: Any = None) -> Any:
            losses = [super(Both, self).compute_loss(batch, None)[0] for batch in inputs.values()]
            return sum(losses), None

    fitted(Both(VectorClassifier()), loaders)


@pytest.mark.parametrize("part", ["model", "model.bert"])
def test_a_checkpoint_of_a_compiled_model_is_one_of_the_model(tmp_path: Path, part: str) -> None:
    def module(compiles: bool) -> TransformersModule:
        made = module_of(tiny_bert_classifier(), ADAMW)
        if compiles:
            owner, _, name = part.rpartition(".")
            compiled = torch.compile(made.get_submodule(part), backend="eager")
            setattr(made.get_submodule(owner), name, compiled)
        return made

    rows = loader(token_rows(4), 2, pad_tokens)
    kept = []
    for compiles in (True, False):
        trained = module(compiles)
        trainer = fitted(trained, rows)
        trainer.save_checkpoint(tmp_path / f"{compiles}.ckpt")
        kept.append(torch.load(tmp_path / f"{compiles}.ckpt", weights_only=True))
        trained.export_pretrained(tmp_path / f"{compiles}")
        loaded = TransformersModule.load_from_checkpoint(tmp_path / f"{compiles}.ckpt")
        exported = TransformersModule.load_from_checkpoint(tmp_path / f"{compiles}")
        resumed = module(not compiles)
        trainer_for(max_epochs=1).fit(resumed, rows, ckpt_path=tmp_path / f"{compiles}.ckpt")
        for other in (loaded, exported, resumed):
            for one, same in zip(trained.parameters(), other.parameters(), strict=True):
                assert torch.equal(one, same)
    assert list(kept[0]["state_dict"]) == list(kept[1]["state_dict"])
    # As checkpoints were written before.
    names = {name.replace(part, f"{part}._orig_mod"): value for name, value in kept[0]["state_dict"].items()}
    module(False).load_state_dict(names)
