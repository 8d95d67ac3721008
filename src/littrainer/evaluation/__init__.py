"""Evaluation and prediction: the loop, what it gathers, and what it returns."""
