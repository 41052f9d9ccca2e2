"""The mean of the weights of two heads of one kind, such as one head before and after it learnt more.

    python benchmarks/mean_of_heads.py BEFORE AFTER OUT

Shapes and draft vocabulary are the same; they are read and stored in bfloat16 (arXiv 2203.05482).
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import specjax


def mean(before: jax.Array, after: jax.Array) -> jax.Array:
    if not jnp.issubdtype(after.dtype, jnp.floating):
        if not np.array_equal(before, after):
            raise SystemExit("the two heads draft different vocabularies")
        return after
    return ((before.astype(jnp.float32) + after.astype(jnp.float32)) / 2).astype(after.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("out")
    parser.add_argument("--target", help="default: the demo model")
    parser.add_argument("--num-draft-tokens", type=int, default=3, help="that its config suggests")
    given = parser.parse_args()
    target, _ = specjax.load(given.target, dtype="bfloat16")
    before, after = (specjax.load_head(name, target) for name in (given.before, given.after))
    if before.head != after.head:
        parser.error(f"{given.before} and {given.after} are heads of different kinds or shapes")
    joined = after.replace(params=jax.tree.map(mean, before.params, after.params))
    specjax.save_head(given.out, joined, target=target, num_tokens=given.num_draft_tokens)


if __name__ == "__main__":
    main()
