"""Families of models that write the codes of images: tensor names and configurations of Hugging Face checkpoints."""
