"""Lightning as the engine: its Trainer from arguments, the module, the callbacks that hear hooks, the fast loops."""
