"""A Trainer on its way into another process, and what it finds there."""
