"""transformers' Trainer API answered by ours, under its own names, in processes of `littrainer run`."""
