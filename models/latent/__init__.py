"""Multi-head latent attention: keys and values of all heads are projections of one short vector per token.

- `sizes`: the record of the sizes in a config.
- `attention`: the block, for layers of decoders and of draft heads.
"""
