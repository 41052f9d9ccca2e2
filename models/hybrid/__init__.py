"""Decoders whose layers differ: attention beside gated linear attention, state-space layers and short convolutions.

- `config`: `HybridConfig`, with one `LayerKind` per layer.
- `recurrence`: the memory of recurrent layers, and one pass over a token tree. It contains the equations.
- `ancestry`: the ancestors of each token of a pass, which all layers share.
- `gated_delta`, `mamba2`, `short_convolution`: the mixers.
- `memory`: the cache of a whole model, key/value and recurrent.
- `block`, `loop`, `decoder`: a layer, the layers in order, and the model.
"""
