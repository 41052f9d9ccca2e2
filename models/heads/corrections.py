"""Corrections that a block drafter adds to the logits of a slot once the token before it is drafted, and a confidence.

Each correction reads the slot's state h after the last norm, and the previous token a. Some carry a state s over the
tokens down to a. A new correction adds zero. `Markov` and `Prefix` return a vector z,
and `logits(z)` is the correction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.types import Array


class Markov(nnx.Module):
    """The correction of DSpark: logits + W2 z.

    vanilla: z = W1 a.
    gated: z = sigmoid(G [h; W1 a]) W1 a.
    rnn: [g; c; o] = J [s; W1 a; h], s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), z = tanh(o).
    """

    def __init__(self, kind: str, vocab: int, size: int, rank: int, width: int, *, dtype, rngs: nnx.Rngs):
        linear = lambda fan_in, fan_out: L.Linear(fan_in, fan_out, bias=True, dtype=dtype, rngs=rngs)
        self.w1 = L.Embedding(vocab, rank, dtype=dtype, rngs=rngs)
        self.w2 = _zero(L.Embedding(size, rank, dtype=dtype, rngs=rngs))
        self.gating = linear(width + rank, rank) if kind == "gated" else None
        self.joint = linear(2 * rank + width, 3 * rank) if kind == "rnn" else None
        self.state_width = rank if kind == "rnn" else 0

    def __call__(self, tokens: Array, h: Array, state: Array) -> tuple[Array, Array]:
        """Return s' and z [B, F, rank] from tokens int32[B, F], h [B, F, D] and s [B, F, S]."""
        z = self.w1(tokens)
        if self.gating is not None:
            z = nnx.sigmoid(self.gating(jnp.concatenate([h, z], -1))) * z
        elif self.joint is not None:
            gate, candidate, out = jnp.split(self.joint(jnp.concatenate([state, z, h], -1)), 3, -1)
            gate = nnx.sigmoid(gate)
            state, z = gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(out)
        return state, z

    def logits(self, z: Array) -> Array:
        """Return the correction float32[B, F, size]."""
        return self.w2.logits(z)


class Prefix(nnx.Module):
    """The correction of Domino: s' = GRU(s, E a), logits + W SiLU(V [h; s']).

    The GRU has no bias, and its gates are in the order r, z, n.
    """

    def __init__(self, vocab: int, rank: int, state: int, width: int, *, dtype, rngs: nnx.Rngs):
        linear = lambda fan_in, fan_out: L.Linear(fan_in, fan_out, dtype=dtype, rngs=rngs)
        self.inputs, self.states = linear(width, 3 * state), linear(state, 3 * state)
        self.narrow = linear(width + state, rank)
        self.wide = _zero(L.Embedding(vocab, rank, dtype=dtype, rngs=rngs))
        self.state_width = state

    def __call__(self, embedded: Array, h: Array, state: Array) -> tuple[Array, Array]:
        """Return the same as `Markov`, for the embeddings of the tokens."""
        r_in, z_in, n_in = jnp.split(self.inputs(embedded), 3, -1)
        r_state, z_state, n_state = jnp.split(self.states(state), 3, -1)
        z = nnx.sigmoid(z_in + z_state)
        state = (1 - z) * jnp.tanh(n_in + nnx.sigmoid(r_in + r_state) * n_state) + z * state
        return state, nnx.silu(self.narrow(jnp.concatenate([h, state], -1)))

    def logits(self, z: Array) -> Array:
        """Return the correction float32[B, F, V]."""
        return self.wide.logits(z)


class Selector(nnx.Module):
    """The correction of DFlash 2: score(a, b) = logit(b) + <A[a] * P h, B[b]>.

    b are the most likely tokens of the slot; other tokens are not drafted.
    """

    def __init__(self, vocab: int, rank: int, width: int, *, dtype, rngs: nnx.Rngs):
        self.predecessor = L.Embedding(vocab, rank, dtype=dtype, rngs=rngs)
        self.successor = _zero(L.Embedding(vocab, rank, dtype=dtype, rngs=rngs))
        self.projection = L.Linear(width, rank, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Array, h: Array, logits: Array, candidates: Array | None, vocab: int) -> Array:
        """Return scores float32[B, F, V] from tokens int32[B, F], h [B, F, D], and K candidates and their logits.

        candidates: None if `logits` has all tokens.
        """
        gate = (self.predecessor(tokens) * self.projection(h)).astype(jnp.float32)
        if candidates is None:
            return logits + jnp.einsum("bfr,vr->bfv", gate, self.successor.weight[...].astype(jnp.float32))
        scores = logits + jnp.einsum("bfr,bfkr->bfk", gate, self.successor(candidates).astype(jnp.float32))
        batch, places, _ = candidates.shape
        at = jnp.arange(batch)[:, None, None], jnp.arange(places)[:, None], candidates
        return jnp.full((batch, places, vocab), -jnp.inf).at[at].max(scores)  # ids below -inf repeat


class Calibration(nnx.Variable):
    """Numbers that are fitted to accepted tokens after training."""


class Confidence(nnx.Module):
    """The confidence of DSpark: the chance that a slot's token is accepted if all tokens before it are.

    It is sigmoid(w [h; W1 a] / T). T is a temperature per slot from sequential temperature scaling, 1 after training.
    """

    def __init__(self, width: int, slots: int, *, dtype, rngs: nnx.Rngs):
        self.proj = L.Linear(width, 1, bias=True, dtype=dtype, rngs=rngs)
        self.temperatures = Calibration(jnp.ones((slots,), jnp.float32))

    def __call__(self, x: Array, slot: Array) -> Array:
        """Return the confidence float32[B, F] from x [B, F, width] and slot int32[B, F]."""
        return jax.nn.sigmoid(self.proj(x)[..., 0].astype(jnp.float32) / self.temperatures[...][slot])


def _zero(table: L.Embedding) -> L.Embedding:
    """Return `table` with zeros for weights."""
    table.weight[...] = jnp.zeros_like(table.weight[...])
    return table
