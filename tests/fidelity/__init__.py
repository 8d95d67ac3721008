"""The same training scripts run with transformers' own Trainer and with ours, and what they leave compared."""
