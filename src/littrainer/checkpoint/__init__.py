"""Checkpoints in transformers' directory format."""
