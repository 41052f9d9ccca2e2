"""Checkpoint formats: Hugging Face folders, GGUF, MaxText, and llama2.c."""
