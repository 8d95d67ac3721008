"""A stand-in for DeepSpeed: an engine for a single process that trains and records its calls."""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import accelerator, utils  # noqa: F401

# Calls of `initialize` and `init_distributed`, with their keywords.
CALLS: list[tuple[str, dict[str, Any]]] = []
# Optimizer steps, from 1 up, with non-finite gradients.
SKIPPED: set[int] = set()


def init_distributed(**keywords: Any) -> None:
    """Record the call."""
    CALLS.append(("init_distributed", keywords))


def initialize(**keywords: Any) -> tuple[Any, Any, None, Any]:
    """Return an engine, its optimizer, no loader, and its schedule."""
    CALLS.append(("initialize", keywords))
    engine = DeepSpeedEngine(**keywords)
    return engine, engine.optimizer, None, engine.lr_scheduler


class WarmupDecayLR:
    """A schedule with DeepSpeed's interface: no rate before the first step."""

    def __init__(self, optimizer: Any, warmup_max_lr: float, warmup_num_steps: int, total_num_steps: int, **_: Any):
        self.optimizer, self.largest = optimizer, warmup_max_lr
        self.warmup, self.total, self.steps = warmup_num_steps, total_num_steps, -1

    def get_last_lr(self) -> list[float]:
        assert self.steps >= 0, "need to call step() first"
        return [self.largest * min((self.steps + 1) / self.warmup, 1.0)]

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_last_lr()[0]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class EngineOptimizer:
    """A wrapper of torch's optimizer that is not a torch optimizer, as in DeepSpeed."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.overflow = False

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class DeepSpeedEngine(nn.Module):
    """An engine without sharding."""

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        model_parameters: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        dist_init_required: bool = True,
    ):
        super().__init__()
        self.module, self.config = model, config
        self.calls: list[tuple[str, Any]] = []
        self.global_steps, self._boundary, self._norm = 0, True, None
        if "optimizer" in config:
            params = config["optimizer"]["params"]
            optimizer = torch.optim.AdamW(model_parameters, **params)
        self.optimizer: Any = None if optimizer is None else EngineOptimizer(optimizer)
        self.lr_scheduler: Any = None
        if callable(lr_scheduler):
            self.lr_scheduler = lr_scheduler(optimizer)
        elif "scheduler" in config:
            self.lr_scheduler = WarmupDecayLR(optimizer, **config["scheduler"]["params"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> None:
        self.calls.append(("backward", scale_wrt_gas))
        (loss / self.config["gradient_accumulation_steps"] if scale_wrt_gas else loss).backward()

    def step(self) -> None:
        assert self._boundary
        self.calls.append(("step", None))
        self.global_steps += 1
        parameters = list(self.module.parameters())
        self._norm = nn.utils.clip_grad_norm_(parameters, self.config.get("gradient_clipping") or math.inf)
        self.optimizer.overflow = self.global_steps in SKIPPED
        if not self.optimizer.overflow:
            self.optimizer.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        for parameter in parameters:
            parameter.grad = None

    def get_global_grad_norm(self) -> Any:
        return self._norm

    def compile(self, backend: str, compile_kwargs: dict[str, Any]) -> None:  # type: ignore[override]
        self.calls.append(("compile", (backend, compile_kwargs)))

    def destroy(self) -> None:
        self.calls.append(("destroy", None))

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self.config["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save", False)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        self.calls.append(("gather", exclude_frozen_parameters))
        return {name: value.clone() for name, value in self.module.state_dict().items()}

    def save_checkpoint(self, save_dir: str, exclude_frozen_parameters: bool = False) -> None:
        self.calls.append(("save", exclude_frozen_parameters))
        folder = Path(save_dir) / f"global_step{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "global_steps": self.global_steps,
        }
        torch.save(state, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        (Path(save_dir) / "latest").write_text(folder.name)
        (Path(save_dir) / "zero_to_fp32.py").write_text("")

    def load_checkpoint(self, load_dir: str, load_module_strict: bool = True, **keywords: Any) -> tuple[Any, Any]:
        self.calls.append(("load", {"load_module_strict": load_module_strict, **keywords}))
        folder = Path(load_dir) / (Path(load_dir) / "latest").read_text()
        state = torch.load(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=True)
        self.module.load_state_dict(state["module"], strict=load_module_strict)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.global_steps = state["global_steps"]
        return str(folder), {}


checkpointing = types.SimpleNamespace(configure=lambda **_: None)
