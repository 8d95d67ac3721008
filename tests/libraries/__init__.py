"""Unchanged scripts of other libraries, run with transformers' Trainer and with littrainer's, and compared."""
