"""The model card: README.md beside a saved model, written from what the Trainer knows."""
