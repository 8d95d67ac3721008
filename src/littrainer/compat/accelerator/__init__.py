"""What `trainer.accelerator` answers, without accelerate."""

from littrainer.compat.accelerator.facade import AcceleratorFacade

__all__ = ["AcceleratorFacade"]
