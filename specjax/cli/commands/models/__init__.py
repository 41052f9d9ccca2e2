"""Commands that examine a model or a draft head: compile, plan, check-bits and inspect."""
