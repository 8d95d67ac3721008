import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from littrainer import PredictionOutput, TFTrainer
from littrainer.checkpoint.layout import PREFIX_CHECKPOINT_DIR


def get_losses(trainer: TFTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(trainer: TFTrainer) -> TFTrainer:
    trainer.train()
    return trainer


def get_weights(model: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.trainable_variables]


def test_a_model_trains_evaluates_and_predicts(make_model: Any, arguments: Any, pairs: Any) -> None:
    args = arguments(eval_strategy="epoch", num_train_epochs=8)
    trainer = TFTrainer(make_model(), args, pairs, pairs, compute_metrics=accuracy)
    train_output = trainer.train()
    assert train_output.global_step == trainer.global_step == 24
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 8
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(evaluations[-1])
    output = trainer.predict(pairs)
    assert isinstance(output, PredictionOutput)
    assert isinstance(output.predictions, np.ndarray) and output.predictions.shape == (12, 2)
    assert output.label_ids.tolist() == [label for _, label in pairs]
    assert output.metrics is not None
    assert output.metrics["eval_accuracy"] == metrics["eval_accuracy"]
    expected = trainer.model.predict(np.stack([features for features, _ in pairs]), verbose=0)
    np.testing.assert_allclose(output.predictions, expected, atol=1e-6)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_training_takes_the_steps_of_an_explicit_torch_loop(linear_model: Any, arguments: Any, pairs: Any) -> None:
    start = get_weights(linear_model)
    args = arguments(max_steps=2, per_device_train_batch_size=12, weight_decay=0.1, lr_scheduler_type="constant")
    train(TFTrainer(linear_model, args, pairs))
    kernel, bias = (torch.tensor(value, requires_grad=True) for value in start)
    groups = [{"params": [kernel], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    features = torch.tensor(np.stack([features for features, _ in pairs]))
    labels = torch.tensor([label for _, label in pairs])
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(features @ kernel + bias, labels).backward()
        torch.nn.utils.clip_grad_norm_([kernel, bias], 1.0)
        optimizer.step()
    np.testing.assert_allclose(get_weights(linear_model)[0], kernel.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(get_weights(linear_model)[1], bias.detach().numpy(), atol=1e-6)


def test_an_overridden_run_model_sets_the_loss(make_model: Any, arguments: Any, pairs: Any) -> None:
    class Tripled(TFTrainer):
        def run_model(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
            logits = self.model(features, training=training)
            return 3 * torch.nn.functional.cross_entropy(logits, labels, reduction="none"), logits

    plain = train(TFTrainer(make_model(), arguments(max_steps=1), pairs, pairs))
    tripled = train(Tripled(make_model(), arguments(max_steps=1), pairs, pairs))
    assert get_losses(tripled) == pytest.approx([3 * get_losses(plain)[0]])
    plain.model.set_weights(tripled.model.get_weights())
    assert tripled.evaluate()["eval_loss"] == pytest.approx(3 * plain.evaluate()["eval_loss"])


def test_accumulated_micro_batches_of_unequal_size_train_as_a_single_batch(
    linear_model: Any, keras: Any, arguments: Any, pairs: Any
) -> None:
    other = keras.models.clone_model(linear_model)
    other.set_weights(linear_model.get_weights())
    other.compile(loss=linear_model.loss)
    # Micro-batches of 8 and 4 samples.
    train(TFTrainer(linear_model, arguments(per_device_train_batch_size=8, gradient_accumulation_steps=2), pairs))
    train(TFTrainer(other, arguments(per_device_train_batch_size=12), pairs))
    np.testing.assert_allclose(get_weights(linear_model)[0], get_weights(other)[0], atol=1e-6)


def test_training_resumes_from_the_newest_checkpoint_with_the_same_dropout(
    make_model: Any, arguments: Any, pairs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(save_strategy="steps", save_steps=2)
    uninterrupted = train(TFTrainer(make_model(), args, pairs))
    folder = Path(args.output_dir)
    for name in (f"{PREFIX_CHECKPOINT_DIR}-4", f"{PREFIX_CHECKPOINT_DIR}-6"):
        shutil.rmtree(folder / name)
    resumed = train(TFTrainer(make_model(), args, pairs))
    assert "resumes from the newest checkpoint in output_dir (checkpoint-2)" in caplog.text
    assert get_losses(resumed) == get_losses(uninterrupted)
    for variable, other in zip(get_weights(resumed.model), get_weights(uninterrupted.model), strict=True):
        np.testing.assert_array_equal(variable, other)
    restarted = TFTrainer(make_model(), arguments(max_steps=1), pairs)
    assert restarted.train(resume_from_checkpoint=False).global_step == 1


def test_a_saved_model_is_loaded_by_keras(make_model: Any, keras: Any, arguments: Any, pairs: Any) -> None:
    trainer = train(TFTrainer(make_model(), arguments(max_steps=1), pairs))
    trainer.save_model()
    folder = Path(trainer.args.output_dir)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "model.keras", "training_args.bin"}
    loaded = keras.models.load_model(folder / "model.keras", compile=False)
    for variable, other in zip(get_weights(loaded), get_weights(trainer.model), strict=True):
        np.testing.assert_array_equal(variable, other)


def test_batches_of_a_script_replace_the_datasets(make_model: Any, arguments: Any, features: Any) -> None:
    batches = [(features[:8], np.zeros(8, "int64")), (features[8:], np.ones(4, "int64"))]

    class ScriptTrainer(TFTrainer):
        def get_train_tfdataset(self) -> Any:
            return batches

        def get_eval_tfdataset(self, eval_dataset: Any = None) -> Any:
            return batches, 1, 8

        def get_test_tfdataset(self, test_dataset: Any) -> Any:
            return batches, 2, 12

    trainer = train(ScriptTrainer(make_model(), arguments(), compute_metrics=lambda p: {"rows": len(p.label_ids)}))
    assert trainer.global_step == 4
    assert trainer.evaluate()["eval_rows"] == 8
    assert trainer.predict(None).label_ids.tolist() == [0] * 8 + [1] * 4


def test_an_overridden_training_step_changes_gradients(linear_model: Any, arguments: Any, pairs: Any) -> None:
    class KernelAlone(TFTrainer):
        def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
            kernel, _ = super().training_step(features, labels, nb_instances_in_global_batch)
            return [kernel, None]

    kernel, bias = get_weights(linear_model)
    trainer = train(KernelAlone(linear_model, arguments(gradient_accumulation_steps=2), pairs))
    assert not np.array_equal(get_weights(linear_model)[0], kernel)
    np.testing.assert_array_equal(get_weights(linear_model)[1], bias)
    assert min(get_losses(trainer)) > 0


@pytest.mark.parametrize(
    ("name", "returned", "message"),
    [("run_model", 0.0, r"a float.*pair \(loss, logits\)"), ("training_step", None, "a NoneType.*list of gradients")],
)
def test_a_wrong_result_of_an_override_is_an_error(
    linear_model: Any, arguments: Any, pairs: Any, name: str, returned: Any, message: str
) -> None:
    kind = type("Forgetful", (TFTrainer,), {name: lambda self, *batch: returned})
    with pytest.raises(TypeError, match=f"{name} returned {message}"):
        kind(linear_model, arguments(), pairs).train()


def test_an_overridden_prediction_step_changes_predictions(make_model: Any, arguments: Any, pairs: Any) -> None:
    class Doubled(TFTrainer):
        def prediction_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
            return 2 * super().prediction_step(features, labels, nb_instances_in_global_batch)

    plain, doubled = (kind(make_model(), arguments()).predict(pairs) for kind in (TFTrainer, Doubled))
    np.testing.assert_allclose(doubled.predictions, 2 * plain.predictions)
    assert doubled.metrics is not None and plain.metrics is not None
    assert doubled.metrics["eval_loss"] == plain.metrics["eval_loss"]


def test_a_subclass_creates_the_optimizer(linear_model: Any, arguments: Any, pairs: Any) -> None:
    class WithPlainSteps(TFTrainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.trainable_parameters(), lr=0.0)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)

    before = get_weights(linear_model)
    trainer = train(WithPlainSteps(linear_model, arguments(), pairs))
    assert trainer.global_step == 6
    np.testing.assert_array_equal(get_weights(linear_model)[0], before[0])


def test_an_override_of_an_unused_method_is_refused(make_model: Any, arguments: Any) -> None:
    for name, replacement in {"compute_loss": "run_model", "apply_gradients": "training_step"}.items():
        kind = type("Mine", (TFTrainer,), {name: lambda self, *args: None})
        with pytest.raises(
            NotImplementedError, match=rf"Mine overrides {name}, which nothing calls.*override {replacement}"
        ):
            kind(make_model(), arguments())


def test_unsupported_arguments_and_optimizers_are_refused(make_model: Any, keras: Any, arguments: Any) -> None:
    model = make_model()
    with pytest.raises(TypeError, match="args, and they are a dict"):
        TFTrainer(model, {"output_dir": "x"})
    for name in ("label_smoothing_factor", "torch_compile", "fsdp", "deepspeed"):
        args = arguments()
        setattr(args, name, 0.1)
        with pytest.raises(NotImplementedError, match=f"{name}=0.1: "):
            TFTrainer(model, args)
    args = arguments()
    args.fp16 = True
    with pytest.raises(NotImplementedError, match=r"Mine.training_step returns gradients.*override run_model"):
        type("Mine", (TFTrainer,), {"training_step": lambda self, *batch: []})(model, args)
    for optimizers in [(keras.optimizers.Adam(), None), (None, keras.optimizers.schedules.CosineDecay(0.1, 10))]:
        with pytest.raises(TypeError, match=r"of Keras.*torch.optim.AdamW"):
            TFTrainer(model, arguments(), optimizers=optimizers)


def test_constraints_hold_after_each_optimizer_step(keras: Any, arguments: Any, pairs: Any) -> None:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(2, kernel_constraint="non_neg")]
    model = keras.Sequential(layers)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    train(TFTrainer(model, arguments(learning_rate=1.0, max_steps=1), pairs))
    assert get_weights(model)[0].min() == 0 < get_weights(model)[0].max()


def test_attributes_that_are_set_later_take_effect(make_model: Any, arguments: Any, pairs: Any) -> None:
    trainer = train(TFTrainer(make_model(), arguments(max_steps=1), pairs, pairs))
    trainer.compute_metrics = accuracy
    assert "eval_accuracy" in trainer.evaluate()
    trainer.custom_attribute = 1
    assert not hasattr(trainer.torch_trainer, "custom_attribute")
    trainer.eval_dataset = pairs[:4]
    assert trainer.get_eval_tfdataset()[2] == 4
    with pytest.raises(AttributeError, match="make another TFTrainer"):
        trainer.model = make_model()


def test_adapters_that_are_added_later_are_trained(linear_model: Any, arguments: Any, pairs: Any) -> None:
    trainer = TFTrainer(linear_model, arguments(max_steps=2), pairs)
    linear_model.layers[0].enable_lora(2)
    before = get_weights(linear_model)
    trainer.train()
    assert len(before) == 3
    assert not any(np.array_equal(*pair) for pair in zip(before, get_weights(linear_model), strict=True))


def test_a_model_that_is_compiled_later_is_checked_when_training_begins(
    linear_model: Any, keras: Any, arguments: Any, pairs: Any
) -> None:
    trainer = TFTrainer(linear_model, arguments(), pairs)
    linear_model.compile(loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum"))
    with pytest.raises(NotImplementedError, match="reduction='sum'"):
        trainer.train()


def test_a_model_without_variables_is_built_with_a_sample(keras: Any, arguments: Any, pairs: Any) -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match=r"no variables yet.*model.build\(input_shape\)"):
        TFTrainer(model, arguments())
    assert train(TFTrainer(model, arguments(), pairs)).global_step == 6


def test_a_stream_needs_a_number_of_steps(make_model: Any, arguments: Any, features: Any, labels: Any) -> None:
    class Streaming(TFTrainer):
        def get_train_tfdataset(self) -> Any:
            class Stream(torch.utils.data.IterableDataset[Any]):
                def __iter__(self) -> Any:
                    return iter([(features, labels)] * 2)

            return Stream()

    with pytest.raises(ValueError, match="set max_steps"):
        Streaming(make_model(), arguments()).train()
    assert train(Streaming(make_model(), arguments(max_steps=4))).global_step == 4


def test_predictions_need_no_labels(make_model: Any, arguments: Any, features: Any) -> None:
    output = TFTrainer(make_model(), arguments()).predict(list(features))
    assert output.predictions.shape == (12, 2)
    assert output.label_ids is None
    assert "eval_loss" not in output.metrics


def test_a_writer_gets_the_logs(make_model: Any, arguments: Any, pairs: Any) -> None:
    writer = MagicMock()
    train(TFTrainer(make_model(), arguments(max_steps=1), pairs, tb_writer=writer))
    assert "train/loss" in [call.args[0] for call in writer.add_scalar.call_args_list]


def test_an_overridden_setup_is_called_for_the_service_in_report_to(
    make_model: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    calls: list[str] = []

    class SetupTrainer(TFTrainer):
        def setup_wandb(self) -> None:
            calls.append("wandb")

    SetupTrainer(make_model(), arguments(report_to="wandb"))
    assert calls == ["wandb"]
