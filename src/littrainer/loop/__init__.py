"""The training loop: length, loss, steps and policies of a training."""
