"""Tiny models, datasets and collators that tests of several rooms train on; nothing here needs a network."""
