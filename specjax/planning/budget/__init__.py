"""The modules here find the batches, prompts and trees that fit in a given memory, and the fastest of them."""
