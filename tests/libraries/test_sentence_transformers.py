"""An unchanged script of sentence-transformers, in several set-ups, equal to its run on transformers' Trainer."""
