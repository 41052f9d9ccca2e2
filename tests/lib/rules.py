"""The modules of acceptance rules: the package `specjax.verifiers` names the objects. And one that is broken."""

import importlib
import importlib.util
import types

import jax.numpy as jnp

from specjax.numerics.sampling import draw
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
