"""Searches with Optuna: the study, and what is left of one whose process was ended."""
