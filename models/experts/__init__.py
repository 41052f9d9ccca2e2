"""Mixtures of experts: a feed-forward block whose router chooses a few of many MLPs for each token.

- `sizes`: the record of a mixture in a config.
- `routing`: from router logits to the experts of each row and their weights.
- `running`: products of rows with the chosen experts.
- `on_mesh`: the same products on the devices of a mesh.
- `counting`: what a pass carries from layer to layer, such as the number of experts that it read.
- `feed`: the block, for attention decoders and hybrid ones.
"""
