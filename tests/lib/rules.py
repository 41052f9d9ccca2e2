"""The modules of acceptance rules: the package `specjax.verifiers` names the objects. And one that is broken."""

import importlib
import importlib.util
import types

import jax.numpy as jnp

from specjax.numerics.sampling import draw
from specjax.types import Verdict
from specjax.verifiers import standard


def module(name: str) -> types.ModuleType:
    """`specjax.verifiers.exact.<name>`, that of `lossy`, or what both use."""
    for folder in ("exact.", "lossy.", ""):
        full = f"specjax.verifiers.{folder}{name}"
        if importlib.util.find_spec(full):
            return importlib.import_module(full)
    raise ModuleNotFoundError(name)


def takes_all(keys, tree, logits):
    """A mutant: takes every drafted token."""
    n = tree.tokens.shape[1]
    last = draw(keys[:, -1], logits[:, -1])
    return standard(keys, tree, logits)._replace(
        path=jnp.broadcast_to(jnp.arange(n), tree.tokens.shape), num_nodes=jnp.full(len(last), n), next_token=last
    )


def takes_valid(keys, tree, logits):
    """A mutant for greedy chains: takes every valid token."""
    del keys
    n = tree.tokens.shape[1]
    count = jnp.sum(tree.valid, 1, dtype=jnp.int32)
    path = jnp.where(jnp.arange(n) < count[:, None], jnp.arange(n), -1).astype(jnp.int32)
    best = jnp.argmax(logits, -1).astype(jnp.int32)
    return Verdict(path, count, jnp.take_along_axis(best, count[:, None] - 1, 1)[:, 0])
