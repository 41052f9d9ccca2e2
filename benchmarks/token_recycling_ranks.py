"""Frequency with which each rank of Token Recycling's matrix is the next token: the source of ACCEPTED_RANKS.

    python benchmarks/token_recycling_ranks.py TEXTS.json

TEXTS.json is written by every_method.py --texts. The matrix is replayed as in decoding: after each token of the text,
the target's 8 likeliest successors are written to the row of the token before.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import specjax


@jax.jit
def runners_up(target, tokens):
    """int32[T, 8]: the likeliest successors at each position of tokens [1, T]."""
    t = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, t, t), bool))
    cache = target.model.init_cache(target.params, None, 1, 1)
    output, _ = target.model.forward(target.params, tokens, cache, positions=jnp.arange(t)[None], mask=mask)
    return jax.lax.top_k(output.logits[0], 8)[1]


def main(path: str) -> None:
    target, _ = specjax.load()
    with open(path) as file:
        data = json.load(file)
    hits, count = np.zeros(8), 0
    for prompt, text in zip(data["prompts"], data["texts"], strict=True):
        if len(prompt) + len(text) > 512:
            continue
        padded = np.zeros((1, 512), np.int32)
        padded[0, : len(prompt) + len(text)] = prompt + text
        best = np.asarray(runners_up(target, jnp.asarray(padded)))
        matrix: dict[int, np.ndarray] = {}
        last = len(prompt) - 1
        for at, token in enumerate([prompt[-1], *text[:-1]], last):
            following = padded[0, at + 1]
            if token in matrix:
                count += 1
                hits += matrix[token] == following
            matrix[token] = best[at]
    print(f"{count} tokens; by rank:", np.round(hits / count, 3).tolist())


if __name__ == "__main__":
    main(sys.argv[1])
