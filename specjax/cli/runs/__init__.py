"""The runs of the commands: loaded models, settings, decoding and reports."""
