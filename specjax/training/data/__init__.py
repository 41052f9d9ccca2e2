"""Training data: target responses, packed rows, and cached activations of the target."""
