"""Optimizers of DeepSpeed's whose states lie on the host."""

from __future__ import annotations

from typing import Any

import torch


class DeepSpeedCPUAdam(torch.optim.AdamW):
    """Adam on the host."""

    def __init__(self, groups: Any, adamw_mode: bool, **settings: Any):
        super().__init__([{**group} for group in groups], **settings)
        self.adamw_mode = adamw_mode
