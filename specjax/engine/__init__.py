"""The decoding loop: preparation of a job, prefill of its prompts, and its steps in one program or from Python."""
