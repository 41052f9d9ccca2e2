"""Families of models that read images: tensor names and configurations of Hugging Face checkpoints."""
