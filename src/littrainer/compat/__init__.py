"""Members of a Trainer for code that was written against transformers."""
