"""DiffuSpec: one denoiser pass gives candidates for each position, and a beam search selects a consistent path.

Li et al.: DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding (2025), arXiv 2510.02358.

Rule: one pass over the text and k masks gives distributions Q_j. *Lattice*: the most likely tokens of each position up
to a mass of `mass`, at most `choices`, and every eos. It ends with the first position whose most likely token is an
eos.
*Causal-consistency path search*: a beam search from left to right with `beams` paths. The score is the sum of
blend * log Q_j(x_j) + (1 - blend) * log P(x_j | x_{j-2}, x_{j-1}), with a trigram model P. Finished paths stay and
compete.
*Adaptive length*: G is the number of most likely tokens before the first eos (k without one). A is the number of
accepted tokens. Both are averaged with weight `rate`. The next k is floor(G) + grow * [A >= G], within `min_tokens` and
`num_tokens`.
Guarantee: distribution: the path is a point mass. The paper's acceptance ratio uses the denoiser's probability from
left to right, which is not the probability of a path from a search.
Deviations: P is the trigram model of the row's own text, counted in every step, with add-one smoothing. The paper ends
the lattice at any eos in a column; here it ends at an eos that is the most likely token. Models with full attention do
not read columns after k. A block-causal one reads masked columns up to the end of the block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest, take_along
from specjax.catalog import Method, Option, shared
from specjax.diffusion import drafting, forward
from specjax.diffusion.types import Denoiser, is_eos
from specjax.errors import UsageError
from specjax.types import Array, Context, Drafter, PyTree, TokenTree, Traits, TreeSize, Verdict

METHOD = Method(
    name="diffuspec",
    kind="drafter",
    guarantee="distribution",
    summary="drafts with a diffusion model and searches its candidate tokens for the most consistent path",
    paper="Li et al. 2025, arXiv 2510.02358",
    needs=frozenset({"denoiser"}),
    options=(
        shared.num_tokens(30, "maximum draft length"),
        Option("min_tokens", "int", 20, "minimum draft length"),
        Option("grow", "int", 10, "maximum increase of the draft length per step"),
        Option("rate", "float", 0.5, "weight of the last step in the moving averages of the draft length"),
        Option("mass", "float", 0.8, "probability mass of the candidates per position"),
        Option("choices", "int", 15, "maximum number of candidates per position"),
        Option("beams", "int", 3, "beams of the search"),
        Option("blend", "float", 0.5, "weight of the diffusion model against a trigram model of the text"),
        Option("eos", "integers", None, "ids of end-of-text tokens; default: none"),
    ),
    arguments=("draft",),
)


class State(NamedTuple):
    denoiser_state: drafting.DenoiserDrafterState
    length: Array  # int32[B], k of the next step
    drafted_length: Array  # float32[B], average of G
    accepted: Array  # float32[B], average of A
    last: Array  # int32[B], G of this step


def diffuspec(
    denoiser: Denoiser,
    *,
    num_tokens: int = 30,
    min_tokens: int = 20,
    grow: int = 10,
    rate: float = 0.5,
    mass: float = 0.8,
    choices: int = 15,
    beams: int = 3,
    blend: float = 0.5,
    eos: tuple[int, ...] | None = None,
) -> Drafter:
    """Return the drafter.

    Args:
      num_tokens, min_tokens: maximum and minimum draft length. grow: maximum increase of the draft length per step.
      rate: weight of the last step in the averages. mass, choices: limits of the candidates per position.
      beams: beams of the search. blend: weight of the denoiser; 1 ignores the trigram model.
      eos: tokens that end a text; None: there are none.

    Raises: UsageError for numbers below 1, min_tokens above num_tokens, or shares outside [0, 1].
    """
    for name, value in (("num_tokens", num_tokens), ("choices", choices), ("beams", beams)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    if not 1 <= min_tokens <= num_tokens:
        raise UsageError(f"min_tokens must be from 1 to num_tokens, {num_tokens}, not {min_tokens}")
    for name, share in (("rate", rate), ("mass", mass), ("blend", blend)):
        if not 0 <= share <= 1:
            raise UsageError(f"{name} must be from 0 to 1, not {share}")
    search = functools.partial(
        _propose, width=num_tokens, mass=mass, choices=choices, beams=beams, blend=blend, eos=tuple(eos or ())
    )
    return Drafter(
        propose=search,
        size=TreeSize(num_tokens + 1, num_tokens),
        init=functools.partial(_init, width=num_tokens),
        update=functools.partial(_update, min_tokens=min_tokens, max_tokens=num_tokens, grow=grow, rate=rate),
        params=(denoiser,),
        traits=Traits(chains=True, rewinds=False),
    )


def _init(params: tuple[Denoiser], context: Context, *, width: int) -> State:
    nothing = jnp.zeros((len(context.tokens),), jnp.int32)
    average = nothing.astype(jnp.float32)
    return State(drafting.init(params, context, width=width), nothing + width, average, average, nothing)


def _update(
    params: PyTree,
    state: State,
    observed: PyTree,
    verdict: Verdict,
    *,
    min_tokens: int,
    max_tokens: int,
    grow: int,
    rate: float,
) -> State:
    growing = verdict.num_nodes > 0
    average = lambda old, new: jnp.where(growing, (1 - rate) * old + rate * new, old)
    drafted_length, accepted = average(state.drafted_length, state.last), average(state.accepted, verdict.num_nodes - 1)
    length = jnp.floor(drafted_length).astype(jnp.int32) + grow * (accepted >= drafted_length)
    return state._replace(
        length=jnp.where(growing, jnp.clip(length, min_tokens, max_tokens), state.length),
        drafted_length=drafted_length,
        accepted=accepted,
    )


def _propose(
    params: tuple[Denoiser], keys: Array, state: State, context: Context, limit: Array, *, width: int, mass: float,
    choices: int, beams: int, blend: float, eos: tuple[int, ...],
) -> tuple[TokenTree, State]:  # fmt: skip
    (denoiser,) = params
    max_tokens = jnp.minimum(state.length, width)
    canvas = drafting.open_canvas(context, width)._replace(end=context.length + max_tokens)
    hidden, pending = drafting.look(denoiser, state.denoiser_state, canvas, width)
    rows = jax.nn.log_softmax(forward.compute_logits(denoiser, hidden), -1)
    ends = is_eos(jnp.array(eos, jnp.int32), first_largest(rows)) & (jnp.arange(width) < max_tokens[:, None])
    first_end = jnp.where(jnp.any(ends, 1), jnp.argmax(ends, 1), max_tokens)
    words = lattice(rows, mass, choices, eos)
    previous = take_along(context.tokens, jnp.maximum(context.length[:, None] + jnp.array([-2, -1]), 0), 1)
    say = functools.partial(trigram, context, rows.shape[-1])
    path, count = search(words, previous, jnp.minimum(first_end + 1, max_tokens), say, beams, blend, eos)
    denoiser_state = drafting.update_cache(denoiser, state.denoiser_state, context, pending, width)
    last = jnp.where(limit > 0, first_end, state.last).astype(jnp.int32)
    return drafting.build_chain(context, path, jnp.minimum(count, limit)), state._replace(
        denoiser_state=denoiser_state, last=last
    )


class Lattice(NamedTuple):
    """Candidate tokens of each position."""

    token: Array  # int32[B, W, M]
    logprob: Array  # float32[B, W, M], under the denoiser; -inf: no candidate


def lattice(rows: Array, mass: float, choices: int, eos: tuple[int, ...]) -> Lattice:
    """Return the candidates of each position, from log-probabilities `rows` float32[B, W, V].

    These are the most likely tokens up to the mass, and every eos.
    """
    logprob, token = jax.lax.top_k(rows, min(choices, rows.shape[-1]))
    p = jnp.exp(logprob)
    logprob = jnp.where(jnp.cumsum(p, -1) - p < mass, logprob, -jnp.inf)
    for end in eos:
        present = jnp.any((token == end) & (logprob > -jnp.inf), -1, keepdims=True)
        logprob = jnp.concatenate([logprob, jnp.where(present, -jnp.inf, rows[..., end : end + 1])], -1)
        token = jnp.concatenate([token, jnp.full_like(token[..., :1], end)], -1)
    return Lattice(token, logprob)


class Beams(NamedTuple):
    """Paths of the beam search, the best first."""

    tokens: Array  # int32[B, P, W]
    previous: Array  # int32[B, P, 2], the last two tokens of the text and the path
    score: Array  # float32[B, P]
    length: Array  # int32[B, P]
    ended: Array  # bool[B, P]


def search(
    words: Lattice, previous: Array, max_tokens: Array, say: Callable[[Array, Array], Array], beams: int, blend: float,
    eos: tuple[int, ...],
) -> tuple[Array, Array]:  # fmt: skip
    """Return (path int32[B, W], its length int32[B]): the best path through the first `max_tokens` [B] positions.

    previous: int32[B, 2], the last two tokens of the text. `say(previous[B, P, 2], token[B, M]) -> float32[B, P, M]`
    returns the trigram log-probabilities of `token` after `previous`.
    """
    batch, width, _ = words.token.shape
    begin = Beams(
        tokens=jnp.zeros((batch, beams, width), jnp.int32),
        previous=jnp.repeat(previous[:, None], beams, 1),
        score=jnp.broadcast_to(jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf), (batch, beams)),
        length=jnp.zeros((batch, beams), jnp.int32),
        ended=jnp.zeros((batch, beams), bool),
    )

    def extend(old: Beams, scores: tuple[Array, Array, Array]) -> tuple[Beams, None]:
        place, token, logprob = scores  # int32[], [B, M], [B, M]
        stays = old.ended | (place >= max_tokens)[:, None]
        trigram_log_probs = blend * logprob[:, None] + (1 - blend) * say(old.previous, token)
        longer = jnp.where(
            stays[..., None] | (logprob == -jnp.inf)[:, None], -jnp.inf, old.score[..., None] + trigram_log_probs
        )
        same = jnp.where(stays, old.score, -jnp.inf)
        score, choice = jax.lax.top_k(jnp.concatenate([same, longer.reshape(batch, -1)], 1), beams)
        grows = choice >= beams
        parent = jnp.where(grows, (choice - beams) // token.shape[1], choice)
        new = take_along(token, jnp.where(grows, (choice - beams) % token.shape[1], 0), 1)  # int32[B, P]
        paths = jax.tree.map(lambda x: take_along(x, parent.reshape(batch, beams, *(1,) * (x.ndim - 2)), 1), old)
        here_now = grows[..., None] & (jnp.arange(width) == place)
        return Beams(
            jnp.where(here_now, new[..., None], paths.tokens),
            jnp.where(grows[..., None], jnp.stack([paths.previous[..., 1], new], -1), paths.previous),
            score,
            paths.length + grows,
            paths.ended | (grows & is_eos(jnp.array(eos, jnp.int32), new)),
        ), None

    places = jnp.arange(width), jnp.moveaxis(words.token, 1, 0), jnp.moveaxis(words.logprob, 1, 0)
    end, _ = jax.lax.scan(extend, begin, places)
    return end.tokens[:, 0], end.length[:, 0]


def trigram(context: Context, vocab: int, previous: Array, token: Array) -> Array:
    """Return float32[B, P, M]: the trigram log-probability of `token` [B, M] after `previous` [B, P, 2].

    It is counted in the row's text, with add-one smoothing.
    """
    first, second, third = (context.tokens[:, i : context.tokens.shape[1] - 2 + i] for i in range(3))
    counted = jnp.arange(third.shape[1]) + 2 < context.length[:, None]
    pair = (
        counted[:, None] & (first[:, None] == previous[..., :1]) & (second[:, None] == previous[..., 1:])
    )  # [B, P, L - 2]
    follows = third[:, None] == token[..., None]  # [B, M, L - 2]
    count = jnp.einsum("bpl,bml->bpm", pair.astype(jnp.float32), follows.astype(jnp.float32))
    return jnp.log((count + 1) / (jnp.sum(pair, 2)[..., None] + vocab))
