"""Accelerator of a Trainer, without accelerate."""

from littrainer.compat.accelerator.facade import AcceleratorFacade

__all__ = ["AcceleratorFacade"]
