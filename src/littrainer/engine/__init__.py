"""Lightning as the engine: its Trainer from training arguments, the module, the bridge of hooks, the fast loops."""
