"""The checkpoint directory format of transformers: written, rotated, found and read."""
