"""Exact resuming of the training data: positions, random number generators, and skipping of trained batches."""
