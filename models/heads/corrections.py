"""What a block drafter adds to its logits once the tokens before a slot are drafted, and how sure it is of them.

Each reads the state h of a slot, behind the last norm, and the token a before it; those with a state of their own, s,
have read the tokens down to a. All are made so that new ones add nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.types import Array


class Markov(nnx.Module):
    """DSpark's: logits + W2 z.

    vanilla: z = W1 a. gated: z = sigmoid(G [h; W1 a]) W1 a. rnn: [g; c; o] = J [s; W1 a; h], s' = sigmoid(g) s +
    (1 - sigmoid(g)) tanh(c), z = tanh(o).
    """

    def __init__(self, kind: str, vocab: int, size: int, rank: int, width: int, *, dtype, rngs: nnx.Rngs):
        linear = lambda fan_in, fan_out: L.Linear(fan_in, fan_out, bias=True, dtype=dtype, rngs=rngs)
        self.w1 = L.Embedding(vocab, rank, dtype=dtype, rngs=rngs)
        self.w2 = _nothing(L.Embedding(size, rank, dtype=dtype, rngs=rngs))
        self.gating = linear(width + rank, rank) if kind == "gated" else None
        self.joint = linear(2 * rank + width, 3 * rank) if kind == "rnn" else None
        self.state_width = rank if kind == "rnn" else 0

    def __call__(self, tokens: Array, h: Array, state: Array) -> tuple[Array, Array]:
        """(s', what to add float32[B, F, size]) of tokens int32[B, F], h [B, F, D], s [B, F, state_width]."""
        z = self.w1(tokens)
        if self.gating is not None:
            z = nnx.sigmoid(self.gating(jnp.concatenate([h, z], -1))) * z
        elif self.joint is not None:
            gate, candidate, out = jnp.split(self.joint(jnp.concatenate([state, z, h], -1)), 3, -1)
            gate = nnx.sigmoid(gate)
            state, z = gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(out)
        return state, self.w2.logits(z)


class Prefix(nnx.Module):
    """Domino's: s' = GRU(s, E a), logits + W SiLU(V [h; s']). The GRU has no bias; its gates stand as r, z, n."""

    def __init__(self, vocab: int, rank: int, state: int, width: int, *, dtype, rngs: nnx.Rngs):
        linear = lambda fan_in, fan_out: L.Linear(fan_in, fan_out, dtype=dtype, rngs=rngs)
        self.inputs, self.states = linear(width, 3 * state), linear(state, 3 * state)
        self.narrow = linear(width + state, rank)
        self.wide = _nothing(L.Embedding(vocab, rank, dtype=dtype, rngs=rngs))
        self.state_width = state

    def __call__(self, embedded: Array, h: Array, state: Array) -> tuple[Array, Array]:
        """As `Markov`, of the embeddings of the tokens."""
        r_in, z_in, n_in = jnp.split(self.inputs(embedded), 3, -1)
        r_state, z_state, n_state = jnp.split(self.states(state), 3, -1)
        z = nnx.sigmoid(z_in + z_state)
        state = (1 - z) * jnp.tanh(n_in + nnx.sigmoid(r_in + r_state) * n_state) + z * state
        return state, self.wide.logits(nnx.silu(self.narrow(jnp.concatenate([h, state], -1))))


class Selector(nnx.Module):
    """DFlash 2's: score(a, b) = logit(b) + <A[a] * P h, B[b]> of the likeliest b of the slot; no others are drafted."""

    def __init__(self, vocab: int, rank: int, width: int, *, dtype, rngs: nnx.Rngs):
        self.predecessor = L.Embedding(vocab, rank, dtype=dtype, rngs=rngs)
        self.successor = _nothing(L.Embedding(vocab, rank, dtype=dtype, rngs=rngs))
        self.projection = L.Linear(width, rank, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Array, h: Array, logits: Array, candidates: Array | None, vocab: int) -> Array:
        """float32[B, F, V] of tokens int32[B, F], h [B, F, D], logits of the candidates and these [B, F, K]; None: of
        all tokens."""
        gate = (self.predecessor(tokens) * self.projection(h)).astype(jnp.float32)
        if candidates is None:
            return logits + jnp.einsum("bfr,vr->bfv", gate, self.successor.weight[...].astype(jnp.float32))
        scores = logits + jnp.einsum("bfr,bfkr->bfk", gate, self.successor(candidates).astype(jnp.float32))
        batch, places, _ = candidates.shape
        at = jnp.arange(batch)[:, None, None], jnp.arange(places)[:, None], candidates
        return jnp.full((batch, places, vocab), -jnp.inf).at[at].set(scores)


class Calibration(nnx.Variable):
    """Numbers that are fitted to what was accepted, not trained."""


class Confidence(nnx.Module):
    """DSpark's: sigmoid(w [h; W1 a] / T), the chance that what is drafted in a slot is accepted if all before it are.

    T: of each slot, from sequential temperature scaling; 1 as trained.
    """

    def __init__(self, width: int, slots: int, *, dtype, rngs: nnx.Rngs):
        self.proj = L.Linear(width, 1, bias=True, dtype=dtype, rngs=rngs)
        self.temperatures = Calibration(jnp.ones((slots,), jnp.float32))

    def __call__(self, x: Array, slot: Array) -> Array:
        """float32[B, F] of x [B, F, width] and slot int32[B, F]."""
        return jax.nn.sigmoid(self.proj(x)[..., 0].astype(jnp.float32) / self.temperatures[...][slot])


def _nothing(table: L.Embedding) -> L.Embedding:
    """`table` with zeros."""
    table.weight[...] = jnp.zeros_like(table.weight[...])
    return table
