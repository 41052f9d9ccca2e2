"""The decoding loop: prepare a job, prefill its prompts, and run it step by step or in one program."""
