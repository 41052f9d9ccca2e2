"""Decoding within a given memory: the batches, prompts and trees that fit, and the fastest of them."""
