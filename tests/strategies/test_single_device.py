from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator

from littrainer.strategies.data_parallel import ResidentDDPStrategy
from littrainer.strategies.single_device import ResidentSingleDeviceStrategy
from tests.scenarios.models import VectorClassifier

# A simulated GPU without values.
GPU = torch.device("meta")


class Module(pl.LightningModule):
    def __init__(self, **marks: Any):
        super().__init__()
        self.model: Any = VectorClassifier()
        vars(self.model).update(marks)


@pytest.mark.parametrize(
    ("marks", "device"),
    [
        ({}, "meta"),
        ({"hf_device_map": {"": 0}}, "meta"),
        ({"hf_device_map": {"inner": 0, "head": 1}}, "cpu"),
        ({"hf_device_map": {"inner": "cpu", "head": "disk"}}, "cpu"),
        ({"quantization_method": "bitsandbytes"}, "cpu"),
    ],
    ids=["plain", "mapped to one device", "spread", "offloaded", "quantized"],
)
@pytest.mark.parametrize(
    ("kind", "place"),
    [(ResidentSingleDeviceStrategy, {"device": GPU}), (ResidentDDPStrategy, {"parallel_devices": [GPU]})],
)
def test_a_model_on_several_devices_is_not_moved(
    kind: Any, place: dict[str, Any], marks: dict[str, Any], device: str
) -> None:
    strategy = kind(accelerator=CPUAccelerator(), **place)
    strategy.connect(Module(**marks))
    strategy.setup(SimpleNamespace(state=SimpleNamespace(fn="validate"), local_rank=0))
    assert {parameter.device.type for parameter in strategy.model.parameters()} == {device}
