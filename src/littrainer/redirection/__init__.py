"""Redirection of transformers' Trainer API to littrainer, in processes of `littrainer run`."""
