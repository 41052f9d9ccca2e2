"""The training loop: initialisation, batches, optimizers, steps, cached activations, and checkpoints."""
