"""littrainer under the names of transformers' Trainer API, in processes of `littrainer run`."""
