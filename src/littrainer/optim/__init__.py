"""Optimizer names to classes, the weight-decay split, and learning-rate schedules."""
