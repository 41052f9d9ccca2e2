"""Description of a model by its files, without its weights: layers, memory of a text, and its own drafting module.

- `layers`: the kinds of the layers, and their pattern.
- `module`: the multi-token-prediction module in the files.
- `model`: the whole description, `specjax.describe_model`.
- `words`: the same as lines of text.
"""
