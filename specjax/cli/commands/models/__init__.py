"""Commands that examine a model or a draft head: compile, plan, quantize, check-bits and inspect."""
