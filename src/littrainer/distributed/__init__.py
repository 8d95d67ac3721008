"""Distributed training: ranks and layout, launcher, process group, collectives and failures."""
