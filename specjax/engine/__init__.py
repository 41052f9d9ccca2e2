"""The loop: prompts are prepared, read and decoded step by step, on the device or from Python."""
