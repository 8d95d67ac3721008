"""What Lightning gives and transformers' Trainer has not: trial steps that find a learning rate or a batch size."""
