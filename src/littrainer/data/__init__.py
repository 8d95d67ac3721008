"""Collators, samplers, loaders, and the windows of micro-batches that optimizer steps draw."""
