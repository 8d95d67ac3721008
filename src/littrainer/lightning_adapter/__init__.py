"""The layer over Lightning: its Trainer built from arguments, the LightningModule, hook callbacks and the fast loop."""
