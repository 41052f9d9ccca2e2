"""Device memory of each kind of head: its parameters, and per batch row its state between two steps.

    python benchmarks/head_memory.py --target llama3_8b --dtype bfloat16

The sizes follow from the shapes of the states that decoding carries; nothing is allocated. Heads have the
shapes and draft lengths that their authors use for the target; EAGLE-3 has 8,192 ids.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from specjax import make_drafter
from specjax.models import abstract_params, make_model
from specjax.models.heads.kinds import KINDS, abstract_head
from specjax.planning.inputs.model_configs import load_config
from specjax.types import Context, Target

CHANGES = {"eagle3": {"draft_vocab_size": 8192}}
SHORT, LONG = 1024, 2048  # tokens of the buffer


def size_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def of_row(target: Target, head, kind: str, buffer: int) -> int:
    """Bytes of the drafter's state of one row."""
    drafter = make_drafter(kind, target, head)
    tokens = jax.ShapeDtypeStruct((1, buffer), jnp.int32)

    def init(params, target_params, tokens):
        context = Context(tokens, jnp.ones((1,), jnp.int32), target=Target(target.model, target_params))
        return drafter.init(params, context)

    return size_of(jax.eval_shape(init, drafter.params, target.params, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2_135m")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    config = load_config(args.target, args.dtype)
    target = Target(make_model(config), abstract_params(config))
    table = Table("head", "parameters, MB", "per row: fixed, kB", "per 1,000 tokens, kB", title=args.target)
    for kind in sorted(KINDS):
        head = abstract_head(kind, KINDS[kind].of_target(config, **CHANGES.get(kind, {})))
        short, long = (of_row(target, head, kind, buffer) for buffer in (SHORT, LONG))
        slope = (long - short) / (LONG - SHORT)
        fixed = short - slope * SHORT
        table.add_row(kind, f"{size_of(head.params) / 1e6:,.1f}", f"{fixed / 1e3:,.0f}", f"{slope:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
