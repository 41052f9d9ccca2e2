"""GEAR: a cache whose full blocks are rounded to a few bits, with a low-rank correction and separate outliers.

Source: Kang et al. 2024, GEAR, arXiv 2403.05527.

Rule: the cache is cut into blocks of `block` tokens. A query at position t reads block i compressed if
t >= (i + 2) * block, and in full precision otherwise. The position alone decides, so a token has the same distribution
in every pass: prefill in any chunks, plain decoding, drafts of any length and trees.
Guarantee: lossy. The compressed model is a fixed law, and speculation over it is as exact as its method.
Attention expands the blocks in plain `jnp`; there is no kernel for them yet.
"""
