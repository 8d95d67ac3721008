from typing import Any

import numpy as np
import pytest
import torch

from littrainer.keras.model import (
    KerasModule,
    check_model,
    check_trainable,
    count_instances,
    mean_over_window,
    run_keras_model,
)


def module_of(model: Any) -> KerasModule:
    return KerasModule(model, lambda *batch: run_keras_model(model, *batch))


def test_a_second_model_of_the_process_has_the_same_names(make_model: Any) -> None:
    first, second = module_of(make_model()), module_of(make_model())
    assert [variable.path for variable in first.keras_model.variables] != [
        variable.path for variable in second.keras_model.variables
    ]
    assert list(first.state_dict()) == list(second.state_dict())
    assert {"sequential/dense/kernel", "sequential/dense_1/kernel"} < set(first.state_dict())


def test_buffers_of_a_torch_module_inside_are_kept_and_moved(keras: Any) -> None:
    norm = torch.nn.BatchNorm1d(3)
    layers = [keras.layers.Input((3,)), keras.layers.TorchModuleWrapper(norm), keras.layers.Dense(1)]
    module = module_of(keras.Sequential(layers))
    norm(torch.ones(2, 3))
    stored = module.state_dict()
    assert any(torch.equal(value, norm.running_mean) for value in stored.values())
    module.double()
    assert norm.running_mean is not None and norm.running_mean.dtype == torch.float64
    assert any(buffer is norm.running_mean for buffer in module.buffers())


def test_moving_statistics_are_buffers_and_frozen_weights_parameters(make_model: Any) -> None:
    model = make_model()
    model.layers[0].trainable = False
    module = module_of(model)
    norm = model.layers[2]
    shared = {id(norm.moving_mean.value), id(norm.moving_variance.value)}
    assert {id(one) for one in module.buffers()} == shared
    assert {id(one) for one in module.parameters()} == {id(one.value) for one in model.variables} - shared
    module.double()
    assert {id(one) for one in module.buffers()} == shared and norm.moving_mean.value.dtype == torch.float64


def test_the_loss_is_the_compiled_one_with_regularization(keras: Any, features: np.ndarray) -> None:
    dense = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.5))
    model = keras.Sequential([keras.layers.Input((4,)), dense])
    model.compile(loss="mse")
    inputs, targets = torch.tensor(features), torch.ones(len(features), 1)
    loss, logits = run_keras_model(model, inputs, targets, True)
    expected = ((logits - targets) ** 2).mean() + 0.5 * (dense.kernel.value**2).sum()
    assert loss.item() == pytest.approx(expected.item())


def test_a_model_whose_call_takes_labels_returns_its_own_loss(keras: Any, features: np.ndarray) -> None:
    class WithLabels(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, inputs: Any, start: Any = None, end: Any = None) -> Any:
            logits = self.dense(inputs)
            return logits if start is None else (logits.sum() * 0 + start.sum() + end.sum(), logits)

    inputs = torch.tensor(features)
    labels = {"start": torch.ones(12), "end": torch.ones(12)}
    loss, logits = run_keras_model(WithLabels(), inputs, labels, True)
    assert (loss.item(), logits.shape) == (24.0, (12, 2))
    assert run_keras_model(WithLabels(), inputs, None, False)[0] is None


def test_a_model_without_a_loss_is_an_error_that_says_where_one_comes_from(keras: Any, features: np.ndarray) -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match=r"Sequential has no loss.*model.compile\(loss=\.\.\.\).*run_model"):
        run_keras_model(model, torch.tensor(features), torch.zeros(12), True)


def test_instances_are_labels_that_count_or_rows() -> None:
    assert count_instances(torch.tensor([[1, -100, 0], [2, -100, -100]])) == 3
    assert count_instances(torch.zeros(5, 3)) == 5
    # What -100 is in 8 bits without a sign.
    assert count_instances(torch.tensor([156, 156, 3], dtype=torch.uint8)) == 3
    assert count_instances(torch.tensor([True, False])) == 2
    assert count_instances({"start": torch.tensor([1, 2]), "end": torch.tensor([0, 0])}) == 2


def test_losses_of_instances_and_means_weigh_alike_in_a_window() -> None:
    labels = [torch.tensor([1, 1, -100]), torch.tensor([0])]
    losses = [torch.tensor([3.0, 5.0, 0.0]), torch.tensor([1.0])]
    means = [torch.tensor(4.0), torch.tensor(1.0)]
    for parts in (losses, means):
        total = sum(mean_over_window(loss, label, torch.tensor(3)) for loss, label in zip(parts, labels, strict=True))
        assert total == 3.0
    # One loss for each row of one-hot labels, and a micro-batch without any label.
    assert mean_over_window(torch.tensor([2.0, 4.0]), torch.eye(2, dtype=torch.int64)) == 3.0
    assert mean_over_window(torch.tensor([0.0, 0.0]), torch.tensor([-100, -100])) == 0.0


def of_module(module: str) -> Any:
    return type("Model", (), {"__module__": module})()


def test_a_model_that_torch_cannot_train_is_refused_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, linear_model: Any, keras: Any
) -> None:
    modules = {"tensorflow.python.keras": "TensorFlow", "tf_keras.src": "TensorFlow", "flax.linen": "JAX"}
    cases = [(of_module(module), NotImplementedError, f"a model of {kind}") for module, kind in modules.items()]
    cases += [
        (torch.nn.Linear(1, 1), TypeError, r"model is a Linear\. Pass it to Trainer"),
        ("bert-base-cased", TypeError, "model is a str. Pass a keras.Model"),
    ]
    for model, error, message in cases:
        with pytest.raises(error, match=message):
            check_model(model)
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(NotImplementedError, match=r"a model of jax.*KERAS_BACKEND=torch before keras"):
        check_model(linear_model)


def test_a_summed_loss_and_a_models_own_step_are_refused(make_model: Any, keras: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"reduction='sum'.*Leave the reduction out"):
        check_trainable(make_model(loss=[keras.losses.MeanSquaredError(reduction="sum")]))
    check_trainable(make_model(loss=["mse"]))
    kind = type("Mine", (keras.Sequential,), {"train_step": lambda self, data: {}})
    with pytest.raises(NotImplementedError, match=r"Mine has its own train_step.*Override run_model"):
        check_trainable(kind())
