"""RSD-S: the W likeliest perturbed paths, by stochastic beam search.

Jeon et al.: Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement (2024),
arXiv 2402.14160; the search: Kool, van Hoof, Welling, Stochastic Beams and Where to Find Them (2019), arXiv 1903.06059.

Rule: each beam has phi, the log-probability of its path, and psi, the perturbed phi. For its children t,
  G(t) = phi + log q(t) + Gumbel noise, conditioned on a maximum of psi: psi(t) = -log(e^-psi - e^-max G + e^-G(t)).
The W largest psi over all beams form the next level. Siblings are in the order of psi.
The paths of the last level are drawn without replacement from the drafter's distribution of complete paths. Siblings
are drawn without replacement from its distribution of tokens. In greedy decoding it is beam search.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.trees.contracts import Builder, Level, Parents, noise, verify_widths
from specjax.types import Array


@functools.cache
def beam(width: int, depth: int) -> Builder:
    """Return a builder of `width` nodes on each of `depth` levels. Raises: UsageError if either is below 1."""
    if min(width, depth) < 1:
        raise UsageError(f"width and depth must be at least 1, not {width} and {depth}")

    def expand(state: tuple[Array, Array], level, parents: Parents):
        num_parents = parents.ids.shape[1]
        batch, vocab = len(parents.ids), parents.vocab_size

        def best_below(log_q, keys, phi, psi, valid):
            """Return the best children of each parent [B, F, w]: their tokens, their psi and their phi."""
            phi_next = phi + log_q
            drawn = None if keys is None else _condition(phi_next + noise(keys, vocab), psi)
            psi_next = jnp.where(valid, parents.unless_greedy(drawn, phi_next), -jnp.inf)
            tokens, psi = gumbel_topk(None, psi_next, min(width, vocab))
            return tokens, psi, take_along(phi_next, tokens, 2)

        phi, psi = (x[:, :num_parents, None] for x in state)  # [B, F, 1], values of the parents
        tokens, psi, phi = parents.reduce(best_below, phi, psi, parents.valid[:, :, None])
        # The best children overall are among the best of each parent.
        flat = lambda x: x.reshape(batch, -1)
        top_psi, place = jax.lax.top_k(flat(psi), min(width, psi.shape[1] * psi.shape[2]))
        pad = lambda x, value: jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=value)
        top_psi, place = pad(top_psi, -jnp.inf), pad(place, 0)
        valid = top_psi > -jnp.inf
        at = lambda x: take_along(flat(x), place, 1)
        parent = take_along(parents.ids, place // tokens.shape[2], 1)
        feed = jnp.broadcast_to(jnp.arange(width), (batch, width))
        safe = lambda x: jnp.where(valid, x, 0.0)
        return (safe(at(phi)), safe(top_psi)), Level(at(tokens), parent, valid, feed)

    nodes = 1 + width * depth
    return Builder(
        init=lambda batch: (jnp.zeros((batch, width)), jnp.zeros((batch, width))),
        expand=expand,
        finish=lambda state, parents, valid: jnp.broadcast_to(jnp.arange(nodes), parents.shape),
        num_nodes=nodes,
        max_depth=depth,
        width=width,
        frontier=width,
        levels=depth,
        draws="chain" if width == 1 else "without_replacement",
        widths=verify_widths(range(1, nodes + 1, width)),
    )


def _condition(g: Array, psi: Array) -> Array:
    """Condition perturbed log-probabilities g [..., V] on a maximum of psi [..., 1], in the numerically stable form."""
    top = jnp.max(g, -1, keepdims=True)
    v = psi - g + jnp.log1p(-jnp.exp(jnp.minimum(g - top, 0.0)))
    return psi - jnp.maximum(v, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(v)))
