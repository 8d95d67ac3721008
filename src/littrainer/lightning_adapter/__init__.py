"""The layer over Lightning: Trainer, LightningModule, hook callbacks and the fast loop."""
