from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner import Tuner
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from littrainer import TransformersModule, set_seed
from tests.lightning_users.fitting import (
    ROWS,
    fit_module,
    loader,
    make_module,
    make_trainer,
    predict,
    record_fit,
    validate,
)
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


# ---- Training mode ---------------------------------------------------------------------------------------------------


def test_a_model_in_evaluation_mode_is_trained_in_training_mode() -> None:
    assert record_fit(make_module(NoisyClassifier().eval()), val=loader(), max_epochs=2).modes == {True}


def test_parts_that_the_user_put_into_evaluation_mode_keep_it() -> None:
    model = tiny_bert_classifier().train()
    module = make_module(model)
    model.bert.eval()
    rows = loader(token_rows(4), 2, pad_tokens)
    modes: list[tuple[bool, bool]] = []

    class Modes(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            modes.append((model.bert.encoder.training, model.dropout.training))

    fit_module(module, rows, rows, callbacks=[Modes()], max_epochs=2)
    assert modes == [(False, True)] * 4


class AroundBert(torch.nn.Module):
    """A custom model around a pretrained model, with a part in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.bert, self.frozen = tiny_bert_classifier().eval(), torch.nn.Linear(2, 2).eval()

    def forward(self, **batch: Any) -> Any:
        return self.bert(**batch)


def test_a_pretrained_model_within_another_model_is_trained_in_training_mode() -> None:
    model = AroundBert()
    fit_module(make_module(model), loader(token_rows(2), 2, pad_tokens))
    assert {name for name, part in model.named_modules() if not part.training} == {"frozen"}


# ---- Optimizer and schedule ------------------------------------------------------------------------------------------


def test_a_loader_without_length_needs_max_steps() -> None:
    batches = list(loader())
    with pytest.raises(ValueError, match=r"lr_scheduler_type='linear' ends with the training.*max_steps"):
        fit_module(make_module(), iter(batches))
    with pytest.raises(ValueError, match=r"warmup_steps=0\.5 is a share.*max_steps"):
        fit_module(make_module(args={"warmup_steps": 0.5}), iter(batches))
    trainer = fit_module(make_module(args={"lr_scheduler_type": "constant"}), iter(batches))
    assert trainer.global_step == len(batches)


@pytest.mark.parametrize("schedule", ["linear", "polynomial"])
def test_a_limit_of_no_batches_trains_nothing(schedule: str) -> None:
    trainer = fit_module(make_module(args={"lr_scheduler_type": schedule, "warmup_steps": 0.1}), limit_train_batches=0)
    assert trainer.global_step == 0 and trainer.state.finished


def test_a_compiled_module_is_refused_with_alternatives() -> None:
    compiled: Any = torch.compile(make_module(), backend="eager")
    with pytest.raises(TypeError, match=r"module\.model\.compile\(\), or module\.model = torch\.compile"):
        fit_module(compiled)
    module = make_module()
    module.model.compile(backend="eager")
    assert fit_module(module).global_step > 0


def test_a_schedule_that_follows_a_metric_steps_with_the_validation() -> None:
    options = {"patience": 0, "factor": 0.5, "threshold": 100.0, "threshold_mode": "abs"}
    args = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": options, "learning_rate": 0.5}
    assert record_fit(make_module(args=args), val=loader(), max_epochs=3).learning_rates[::3] == [0.5, 0.5, 0.25]


def test_a_passed_optimizer_and_schedule_are_used() -> None:
    model = VectorClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2)
    module = make_module(model, optimizers=(optimizer, schedule))
    assert record_fit(module).learning_rates == [0.0625, 0.0625, 0.125] and module.trainer.optimizers == [optimizer]


@pytest.mark.parametrize(
    ("keywords", "args", "bound"),
    [
        ({}, {}, 1.0),
        ({}, {"max_grad_norm": 0.25}, 0.25),
        ({"gradient_clip_val": 0.125}, {"max_grad_norm": 0.25}, 0.125),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}, 0.01),
        ({"gradient_clip_val": 0}, {}, None),
    ],
)
def test_gradients_are_clipped_by_gradient_clip_val_or_max_grad_norm(
    keywords: dict[str, Any], args: dict[str, Any], bound: float | None
) -> None:
    rows = [{**row, "x": row["x"] * 100} for row in vector_rows(ROWS)]
    # Lightning refuses to clip with fused optimizers in mixed precision.
    module = make_module(args={"optim": "adamw_torch_fused", **args})
    torch.nn.init.normal_(module.model.head.weight, std=50)
    order = float("inf") if "gradient_clip_algorithm" in keywords else 2
    clipped = record_fit(module, loader(rows), precision="bf16-mixed", **keywords).clipped
    norm = max(torch.linalg.vector_norm(gradient, order).item() for gradient in clipped)
    assert norm > 2 if bound is None else norm == pytest.approx(bound, rel=1e-3)


def test_the_learning_rate_finder_sets_and_saves_the_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_module()
    monkeypatch.chdir(tmp_path)
    finder = Tuner(make_trainer(max_epochs=20)).lr_find(module, loader(), num_training=40, update_attr=True)
    assert finder is not None and finder.suggestion() is not None
    assert module.args.learning_rate == module.learning_rate == finder.suggestion()
    assert module.hparams["args"]["learning_rate"] == module.learning_rate


# ---- The loss --------------------------------------------------------------------------------------------------------


def test_losses_are_read_from_the_device_only_to_show_or_log_them() -> None:
    class ReadCounter(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    def count_reads(micro_batches: int, **keywords: Any) -> int:
        module = make_module(args={"optim": "sgd", "max_grad_norm": 0})
        with ReadCounter() as counter:
            fit_module(module, DataLoader([batch] * micro_batches, batch_size=None), log_every_n_steps=8, **keywords)
        return counter.number

    batch = next(iter(loader()))
    assert count_reads(16) == count_reads(4)
    logger = DummyLogger()
    assert count_reads(16, logger=logger) - count_reads(7, logger=logger) == 2
    bar: Any = {"enable_progress_bar": True, "callbacks": [pl.callbacks.TQDMProgressBar()]}
    assert count_reads(16, **bar) > count_reads(4, **bar)


def test_a_loss_function_gets_the_number_of_items() -> None:
    numbers = []

    def sum_losses(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
        numbers.append(float(num_items_in_batch))
        return cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    fit_module(make_module(LogitsOnly(), compute_loss_func=sum_losses, args={"label_names": ["labels"]}))
    assert numbers == [4, 4, 2]


def test_arguments_that_the_model_does_not_support_are_refused() -> None:
    with pytest.raises(ValueError, match=r"activation_checkpointing_enable\(\)"):
        fit_module(make_module(args={"gradient_checkpointing": True}))
    with pytest.raises(ValueError, match="VectorClassifier has no `generate`"):
        make_module(args={"predict_with_generate": True})


def test_a_batch_that_is_no_mapping_is_refused_with_advice() -> None:
    pairs = torch.utils.data.TensorDataset(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
    for run in (fit_module, validate, predict):
        with pytest.raises(TypeError, match=r"was handed a list as a batch.*default_data_collator.*_batch_transfer"):
            run(make_module(), DataLoader(pairs, batch_size=2))


def test_batches_of_several_loaders_are_passed_to_compute_loss() -> None:
    class Both(TransformersModule):
        def compute_loss(self, inputs: dict[str, Any], num_items_in_window: Any = None) -> Any:
            losses = [super(Both, self).compute_loss(batch, None)[0] for batch in inputs.values()]
            return sum(losses), None

    fit_module(Both(VectorClassifier()), {"a": loader(), "b": loader()})


class Climbing(torch.optim.Optimizer):
    """An optimizer that steps with gradients from a higher point, as SAM does."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        with torch.no_grad():
            climbed = [0.1 * parameter.grad for parameter in parameters]
            torch._foreach_add_(parameters, climbed)
            self.zero_grad()
            with torch.enable_grad():
                loss = closure()
            torch._foreach_sub_(parameters, climbed)
            torch._foreach_sub_(parameters, [0.1 * parameter.grad for parameter in parameters])
        return loss


@pytest.mark.parametrize("make", [partial(torch.optim.LBFGS, lr=0.1, max_iter=3), Climbing])
def test_an_optimizer_that_needs_a_closure_steps_with_it(make: Any) -> None:
    class ClosureModule(TransformersModule):
        calls = 0

        def configure_optimizers(self) -> Any:
            optimizer = make(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)]

        def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
            self.calls += 1
            return super().training_step(batch, batch_idx)

    module = ClosureModule(VectorClassifier(), {"max_grad_norm": 0.0})
    expected = copy.deepcopy(module.model)
    optimizer, calls = make(expected.parameters()), 0
    for batch in loader():

        def closure(batch: Any = batch) -> Any:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = expected(**batch)["loss"]
            loss.backward()
            return loss

        if make is Climbing:
            closure()
        optimizer.step(closure)
    fit_module(module, gradient_clip_val=0)
    assert module.calls == calls
    assert all(torch.equal(*pair) for pair in zip(module.model.parameters(), expected.parameters(), strict=True))
    with pytest.raises(ValueError, match="accumulate_grad_batches=2 would add the gradients up"):
        fit_module(module, accumulate_grad_batches=2)


# ---- Evaluations -----------------------------------------------------------------------------------------------------


def test_losses_and_metrics_are_logged_under_lightnings_names() -> None:
    module = make_module(
        compute_metrics=lambda prediction: {"eval_right": accuracy(prediction)["accuracy"], "half": 0.5}
    )
    trainer = fit_module(module, val=loader())
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss", "val_right", "val_half"}
    (tested,) = trainer.test(module, loader(), verbose=False)
    assert set(tested) == {"test_loss", "test_right", "test_half"}


def test_validate_returns_and_prints_the_numbers_of_each_loader(capsys: pytest.CaptureFixture[str]) -> None:
    class Plain(pl.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.model(**batch)["loss"])

    # An empty loader has no numbers.
    results, module = {}, make_module(args={"logging_nan_inf_filter": False})
    for candidate in (module, Plain(module.model)):
        trainer = make_trainer()
        loaders = [[], loader(vector_rows(3, 1)), loader(vector_rows(8, 2))]
        returned = trainer.validate(candidate, loaders)
        results[type(candidate)] = (returned, trainer.callback_metrics, trainer.logged_metrics, capsys.readouterr().out)
    ours, plain = results.values()
    assert len(ours[0][1]) == len(ours[0][2]) == 1 and ours[0][1] != ours[0][2]
    assert ours == plain


@pytest.mark.parametrize("kind", ["metric", "collection", "dict"])
def test_metrics_of_torchmetrics_are_updated_with_each_batch(kind: str) -> None:
    metric = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="micro")
    collection = torchmetrics.MetricCollection({"accuracy": metric})
    options: Any = {"metric": metric, "collection": collection, "dict": {"accuracy": metric}}[kind]
    module = make_module(compute_metrics=options)
    fit_module(module, val=loader(), max_epochs=2)
    name = "val_multiclass_accuracy" if kind == "metric" else "val_accuracy"
    by_function = validate(TransformersModule(module.model, compute_metrics=accuracy))
    assert validate(module)[name] == pytest.approx(by_function["val_accuracy"])


def test_a_metric_is_no_submodule_and_is_reset_after_an_evaluation() -> None:
    metric = torchmetrics.AUROC("multiclass", num_classes=CLASSES)
    module = make_module(compute_metrics=metric)
    assert "val_multiclass_auroc" in validate(module) and metric.preds == []
    assert module.compute_metrics is metric and [name for name, _ in module.named_children()] == ["model"]


def test_metric_functions_get_padded_predictions_and_requested_inputs() -> None:
    args, rows = {"include_for_metrics": ["inputs", "loss"]}, token_rows(7)
    shaped: dict[str, Any] = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    module = make_module(tiny_bert_classifier(), args, compute_metrics=shapes_and_sums, **shaped)
    values = validate(module, loader(rows, 3, pad_tokens))
    longest = max(len(row["input_ids"]) for row in rows)
    sizes = {"predictions": 7, "inputs": 7 * longest, "losses": 7}
    assert {name: values[f"val_{name}_size"] for name in sizes} == sizes


def test_an_error_of_a_metric_function_names_its_step() -> None:
    def failing_metric(prediction: Any) -> dict[str, float]:
        raise KeyError("accuracy")

    with pytest.raises(KeyError) as raised:
        fit_module(make_module(compute_metrics=failing_metric), val=loader(), num_sanity_val_steps=0)
    assert "at optimizer step 3" in raised.value.__notes__[0] and "float32 (10, 3)" in raised.value.__notes__[0]


@pytest.mark.parametrize("weighting", ["samples", "labels"])
def test_the_loss_of_an_evaluation_can_be_weighted_exactly(weighting: str) -> None:
    module, rows = make_module(tiny_gpt2(), {"eval_loss_weighting": weighting}), language_rows(5)
    first, second = (validate(module, loader(rows, size, pad_tokens))["val_loss"] for size in (2, 5))
    assert (first == pytest.approx(second, rel=1e-6)) is (weighting == "labels")


def test_predict_returns_logits_without_labels_and_without_the_loss_of_a_tuple() -> None:
    class TupleModel(VectorClassifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            outputs = super().forward(x, labels)
            return tuple(outputs[name] for name in ("loss", "logits") if outputs.get(name) is not None)

    expected = predict(make_module(), loader([{"x": row["x"]} for row in vector_rows(ROWS)]))
    assert [tuple(logits.shape) for logits in expected] == [(4, CLASSES), (4, CLASSES), (2, CLASSES)]
    for model in (VectorClassifier, TupleModel):
        set_seed(0)
        torch.testing.assert_close(predict(make_module(model())), expected, rtol=0, atol=0)


def test_predictions_are_generated_under_predict_with_generate() -> None:
    model = tiny_t5()
    args = {"predict_with_generate": True, "generation_max_length": 5}
    batches = loader(translation_rows(4), 4, pad_translations)
    module = make_module(model, args, compute_metrics=shapes_and_sums)
    (tokens,) = predict(module, batches)
    (batch,) = batches
    expected = model.eval().generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_length=5)
    assert not tokens.is_floating_point() and torch.equal(tokens[:, : expected.shape[1]], expected)
    assert validate(module, batches)["val_predictions_size"] == tokens.numel()
    (shorter,) = predict(make_module(model, args, generation_kwargs={"max_length": 3}), batches)
    assert not torch.equal(shorter, tokens)


# ---- Subclasses, copies and checkpoints ------------------------------------------------------------------------------


def test_a_subclass_overrides_loss_predictions_and_parameter_groups() -> None:
    class OverridingModule(TransformersModule):
        def compute_loss(self, inputs: dict[str, Any], num_items_in_window: Any = None) -> Any:
            loss, outputs = super().compute_loss(inputs, num_items_in_window)
            return loss * 0 + 7, outputs

        def prediction_outputs(self, inputs: dict[str, Any], wants_loss: bool = True) -> Any:
            loss, predictions, labels = super().prediction_outputs(inputs, wants_loss)
            return loss, predictions.softmax(-1), labels

        def optimizer_groups(self) -> list[dict[str, Any]]:
            return [{"params": list(self.model.head.parameters()), "lr": 0.25}]

    set_seed(0)
    module = OverridingModule(VectorClassifier(), {"lr_scheduler_type": "constant"})
    before = copy.deepcopy(module.model.state_dict())
    trainer = fit_module(module)
    assert trainer.callback_metrics["train_loss"] == 7
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.25]
    assert torch.equal(before["inner.weight"], module.model.inner.weight)
    torch.testing.assert_close(predict(module)[0].sum(-1), torch.ones(4))


def test_a_function_creates_the_model_once_and_late() -> None:
    created = []

    def make() -> VectorClassifier:
        created.append(VectorClassifier())
        return created[-1]

    module = TransformersModule(make)
    assert module.model is None and not created
    fit_module(module, val=loader()).validate(module, loader(), verbose=False)
    assert created == [module.model]


def test_a_trained_module_can_be_copied_and_pickled() -> None:
    module = make_module(args={"neftune_noise_alpha": None}, compute_metrics=accuracy)
    copies: list[TransformersModule] = []

    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            copies.append(copy.deepcopy(module))

    fit_module(module, val=loader(), callbacks=[Copies()])
    copies.append(pickle.loads(pickle.dumps(module)))
    assert all(copied.model is not module.model for copied in copies)
    assert [validate(copied) for copied in copies[-2:]] == [validate(module)] * 2


@pytest.mark.parametrize("part", ["model", "model.bert"])
def test_a_checkpoint_of_a_compiled_model_is_a_checkpoint_of_the_model(tmp_path: Path, part: str) -> None:
    def build(is_compiled: bool) -> TransformersModule:
        module = make_module(tiny_bert_classifier(), ADAMW)
        if is_compiled:
            owner, _, name = part.rpartition(".")
            compiled = torch.compile(module.get_submodule(part), backend="eager")
            setattr(module.get_submodule(owner), name, compiled)
        return module

    rows = loader(token_rows(4), 2, pad_tokens)
    state_dicts = []
    for is_compiled in (True, False):
        trained, file = build(is_compiled), tmp_path / f"{is_compiled}.ckpt"
        fit_module(trained, rows).save_checkpoint(file)
        state_dicts.append(torch.load(file, weights_only=True)["state_dict"])
        trained.export_pretrained(tmp_path / f"{is_compiled}")
        resumed = build(not is_compiled)
        make_trainer().fit(resumed, rows, ckpt_path=file)
        loaded = [TransformersModule.load_from_checkpoint(path) for path in (file, tmp_path / f"{is_compiled}")]
        for other in (*loaded, resumed):
            assert all(map(torch.equal, trained.parameters(), other.parameters()))
    assert list(state_dicts[0]) == list(state_dicts[1])
    # Names of older checkpoints.
    names = {name.replace(part, f"{part}._orig_mod"): value for name, value in state_dicts[0].items()}
    build(False).load_state_dict(names)
