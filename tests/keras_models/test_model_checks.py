import sys
import types
from typing import Any

import pytest
import torch

from littrainer.keras_models.model_checks import (
    check_arguments,
    check_model,
    check_optimizers,
    check_training_of,
    check_writer,
)


def of_module(module: str, name: str = "Model") -> Any:
    return type(name, (), {"__module__": module})()


@pytest.mark.parametrize(
    ("module", "framework"),
    [
        ("tensorflow.python.keras.engine", "TensorFlow"),
        ("tf_keras.src.engine.training", "TensorFlow"),
        ("flax.linen.module", "JAX"),
    ],
)
def test_a_model_of_another_framework_is_refused_with_the_next_step(module: str, framework: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"Model is a model of {framework}.*KERAS_BACKEND=torch"):
        check_model(of_module(module))


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_a_keras_model_on_another_backend_is_refused_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, make_model: Any, keras: Any, backend: str
) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    with pytest.raises(NotImplementedError, match=rf"on the backend '{backend}'.*KERAS_BACKEND=torch before keras"):
        check_model(make_model())


def test_keras_2_is_taken_for_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Model", (), {"__module__": "keras.engine.training"})
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(Model=kind))
    with pytest.raises(NotImplementedError, match="on the backend 'tensorflow'"):
        check_model(kind())


def test_a_module_of_torch_belongs_to_trainer(keras: Any) -> None:
    with pytest.raises(TypeError, match=r"model is a Linear\. Pass it to Trainer"):
        check_model(torch.nn.Linear(1, 1))


def test_anything_else_is_no_model(keras: Any) -> None:
    with pytest.raises(TypeError, match=r"model is a str. Pass a keras.Model"):
        check_model("bert-base-cased")


def test_a_loss_that_is_a_sum_is_refused(make_model: Any, keras: Any) -> None:
    summed = keras.losses.MeanSquaredError(reduction="sum")
    for loss in (summed, [summed]):
        with pytest.raises(NotImplementedError, match=r"reduction='sum'.*Leave the reduction out"):
            check_training_of(make_model(loss=loss))
    check_training_of(make_model(loss=["mse"]))


def test_a_model_with_a_step_of_its_own_is_refused(keras: Any) -> None:
    kind = type("Mine", (keras.Sequential,), {"train_step": lambda self, data: {}})
    with pytest.raises(NotImplementedError, match=r"Mine has a train_step of its own.*Override run_model"):
        check_training_of(kind())


def test_arguments_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="args, and they are a dict"):
        check_arguments({"output_dir": "x"})


def test_smoothed_labels_are_refused_and_kerass_own_named(arguments: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"label_smoothing_factor=0.1.*CategoricalCrossentropy"):
        check_arguments(arguments(label_smoothing_factor=0.1))


def test_a_compiled_step_is_refused(arguments: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"torch_compile=True.*Leave it out"):
        check_arguments(arguments(torch_compile=True))


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_a_model_that_would_be_split_is_refused(arguments: Any, name: str) -> None:
    args = arguments()
    setattr(args, name, ["full_shard"])
    with pytest.raises(NotImplementedError, match=f"{name}: a Keras model holds each variable whole"):
        check_arguments(args)


def test_an_optimizer_of_keras_is_refused_and_one_of_torch_is_taken(keras: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    check_optimizers((torch.optim.SGD([parameter], lr=0.1), None))
    with pytest.raises(TypeError, match=r"optimizers\[0\] is a keras.*Adam.*torch.optim.AdamW"):
        check_optimizers((keras.optimizers.Adam(), None))
    with pytest.raises(TypeError, match=r"optimizers\[1\] is a keras.*lr_scheduler_type"):
        check_optimizers((None, keras.optimizers.schedules.CosineDecay(0.1, 10)))
    with pytest.raises(TypeError, match="has to be a pair"):
        check_optimizers(torch.optim.SGD([parameter], lr=0.1))


def test_a_writer_of_tensorflow_is_refused() -> None:
    with pytest.raises(TypeError, match=r"tb_writer is a tensorflow.*SummaryWriter"):
        check_writer(of_module("tensorflow.python.ops.summary_ops_v2", "_ResourceSummaryWriter"))
