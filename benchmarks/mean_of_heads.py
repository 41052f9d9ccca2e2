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


def mean(first: jax.Array, second: jax.Array) -> jax.Array:
    if not jnp.issubdtype(second.dtype, jnp.floating):
        if not np.array_equal(first, second):
            raise SystemExit("the two heads draft different vocabularies")
        return second
    return ((first.astype(jnp.float32) + second.astype(jnp.float32)) / 2).astype(second.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("out")
    parser.add_argument("--target", help="default: the demo model")
    parser.add_argument("--num-draft-tokens", type=int, default=3, help="that its config suggests")
    args = parser.parse_args()
    target, _ = specjax.load(args.target, dtype="bfloat16")
    first, second = (specjax.load_head(name, target) for name in (args.before, args.after))
    if first.head != second.head:
        parser.error(f"{args.before} and {args.after} are heads of different kinds or shapes")
    joined = second.replace(params=jax.tree.map(mean, first.params, second.params))
    specjax.save_head(args.out, joined, target=target, num_tokens=args.num_draft_tokens)


if __name__ == "__main__":
    main()
