"""Members of a Trainer for code written against transformers."""
