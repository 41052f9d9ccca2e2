"""Commands that examine a model or a draft head: compile, plan, quantize, group-experts, check-bits and inspect."""
