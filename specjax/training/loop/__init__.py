"""The training loop: trainable parts, optimizers, recipes, and checkpoints."""
