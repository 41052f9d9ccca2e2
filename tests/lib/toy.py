"""Tiny models and drafters with distributions that can be enumerated."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import chisquare

from specjax import decode
from specjax.drafters import autoregressive
from specjax.models import LlamaConfig, init_params, make_model
from specjax.models.storage import SCHEMES, quantize_params, stored_format
from specjax.numerics import sampling
from specjax.numerics.quantized_array import WeightFormat
from specjax.retrieval.datastore import Datastore, from_documents
from specjax.trees import operations
from specjax.trees.templates import Template
from specjax.types import (
    Appended,
    Capabilities,
    Controller,
    Drafter,
    Mixture,
    Model,
    Output,
    Stream,
    Target,
    TokenTree,
    Traits,
    TreeSize,
)

DATA = pathlib.Path(__file__).parent.parent / "data"
MARKOV = json.loads((DATA / "verification_joint_markov.json").read_text())
ONE_STEP = json.loads((DATA / "verification_one_step.json").read_text())
TARGET_ROWS = np.array(MARKOV["target_rows"], np.float32)
DRAFT_ROWS = np.array(MARKOV["draft_rows"], np.float32)
# A limit that jumps about between 0 and 4, differently in every row and with everything that happened before.
ADVERSARY = Controller(
    init=lambda batch: jnp.arange(batch, dtype=jnp.uint32) * 7919 + 11,
    limit=lambda state: ((state >> 7) % 5).astype(jnp.int32),
    update=lambda state, info: (state + info.accepted.astype(jnp.uint32)) * 1664525 + 1013904223,
)


@functools.cache
def markov_model(vocab: int) -> Model:
    """A model whose next token depends on the last one alone; params: float32[V, V], rows of probabilities.

    It remembers nothing. Two layers: each that runs, attention and MLP by half, takes it from the uniform distribution
    towards that of the row.
    """

    def distribution(params, tokens, share):
        """The stream after a share of the layers: log probabilities, which the head leaves as they are."""
        if isinstance(tokens, Stream):
            return tokens.values
        if isinstance(tokens, Mixture):
            rows = jnp.sum(params[tokens.ids] * tokens.weights[..., None], 2)
        elif isinstance(tokens, Appended):
            rows = jnp.concatenate([params[tokens.tokens], jnp.maximum(tokens.vectors @ params, 1e-6)], 1)
        else:
            rows = params[tokens]
        return jnp.log(jnp.where(share < 1, share * rows + (1 - share) / vocab, rows))

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None, layers=None, group=1):
        share = 1.0 if layers is None else jnp.mean((layers.attention + 0.0 + layers.mlp) / 2, 1)[:, None, None]
        streams = tuple(distribution(params, tokens, tap / 2) for tap in taps)
        logits = distribution(params, tokens, share)
        return Output(logits, jnp.maximum(logits, -1e9), streams), ()  # hidden states are finite

    return Model(
        init_cache=lambda params, inputs, batch, capacity: (),
        forward=forward,
        commit=lambda cache, pending, path, num_nodes: cache,
        rewind=lambda cache, length: cache,
        vocab_size=vocab,
        max_positions=1 << 20,
        name="markov",
        embed=lambda params, tokens: jax.nn.one_hot(tokens, vocab),
        unembed=lambda params, hidden: hidden,
        head=lambda params, stream: stream,
        capabilities=Capabilities(
            num_layers=2, taps=True, layer_skipping=True, groups=None, mixtures=True, streams=True, vectors=True
        ),
    )


def markov(rows=TARGET_ROWS) -> Target:
    """The Markov toy of the cards (context: the last token)."""
    return Target(markov_model(len(rows)), jnp.asarray(rows))


@functools.cache
def scripted_model(vocab: int) -> Model:
    """A model whose next token depends on the position alone; params: int32[B, S], the token at each position."""

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        following = jnp.take_along_axis(params, jnp.minimum(positions + 1, params.shape[1] - 1), 1)
        logits = 9.0 * jax.nn.one_hot(following, vocab)
        return Output(logits, jnp.zeros((*tokens.shape, 1))), ()

    return markov_model(vocab)._replace(forward=forward, name="scripted", capabilities=Capabilities())


def scripted(rows, vocab: int) -> Target:
    """A greedy target that writes row b of `rows` int[B, S], whatever it reads; the prompt counts as its beginning."""
    return Target(scripted_model(vocab), jnp.asarray(rows, jnp.int32))


@functools.cache
def template(branching: tuple[int, ...]) -> Template:
    """`branching[d]` children for each node of depth d."""
    paths, level = [], [()]
    for width in branching:
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return Template(paths)


@functools.cache
def branching_drafter(branching: tuple[int, ...]) -> Drafter:
    """Children drawn without replacement (Gumbel-top-k) from Markov rows given as params.

    `branching` is static: the number of children per depth.
    """
    shape = template(branching)

    def propose(params, keys, state, context, limit):
        root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, 1)
        tokens = jnp.pad(root, ((0, 0), (0, shape.num_nodes - 1)))
        distributions = jnp.zeros((*tokens.shape, params.shape[0]))
        children = {}
        for node in range(shape.num_nodes):
            if node:
                parent, rank = int(shape.parents[node]), int(shape.ranks[node])
                tokens = tokens.at[:, node].set(children[parent][:, rank])
            distribution = sampling.warp(jnp.log(params[tokens[:, node]]), context.sampling)
            distributions = distributions.at[:, node].set(distribution)
            noise = jax.vmap(lambda key, node=node: jax.random.gumbel(jax.random.fold_in(key, node), params.shape[1:]))(
                keys
            )
            children[node] = jax.lax.top_k(distribution + noise, max(branching))[1]
        parents = jnp.broadcast_to(shape.parents, tokens.shape)
        valid = operations.depths(parents) <= limit[:, None]
        return TokenTree(tokens, parents, valid, distributions), state

    return Drafter(
        propose=propose,
        size=TreeSize(shape.num_nodes, len(branching)),
        traits=Traits(draws="without_replacement"),
    )


@functools.cache
def tiny_llama(seed: int = 0, layers: int = 2, width: int = 32, vocab: int = 64, **changes) -> Target:
    """A random Llama with clear argmax gaps."""
    shapes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "tied": False, "max_positions": 512} | changes
    config = LlamaConfig(vocab_size=vocab, width=width, num_layers=layers, mlp_width=2 * width, **shapes)
    params = init_params(config, jax.random.key(seed))
    params["head"]["weight"] = params["head"]["weight"] * 6.0
    return Target(make_model(config), params)


def quantized(target: Target, scheme: str | WeightFormat, *patterns: str, **changes) -> Target:
    """The target with the matrices of these module paths, by default all, rounded to a scheme or format, with changes
    of that."""
    form = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    form = stored_format(dataclasses.replace(form, **changes), "cpu")
    formats = tuple((pattern, form) for pattern in patterns or ("*",))
    config = dataclasses.replace(target.model.config, quantized=formats)
    return Target(make_model(config), quantize_params(target.params, config))


@functools.cache
def tiny_llama_alike() -> Target:
    """The random Llama with noise on its weights, a draft model that errs now and then."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape).astype(np.float32), tiny_llama())


def compiled(drafter: Drafter) -> Drafter:
    """Compile a drafter's functions, for tests that call them directly: operation by operation they take several times
    as long."""
    names = ("init", "propose", "observe", "update")
    return drafter.replace(**{name: jax.jit(getattr(drafter, name)) for name in names})


@functools.cache
def tiny_datastore(vocab: int) -> Datastore:
    """Random documents in two shards, and the greedy text of `tiny_llama` if that is its vocabulary."""
    documents = np.random.default_rng(0).integers(0, vocab, (8, 100)).tolist()
    if vocab == 64:
        key = jax.random.key(0)
        documents += decode(tiny_llama(), autoregressive(), [[5], [7, 7, 7]], key=key, max_new_tokens=16).to_lists()
    return from_documents(documents, vocab, shard_tokens=500)


def joint_distribution(rows: np.ndarray, start: int, length: int) -> np.ndarray:
    """float64[V, ..., V]: the distribution of `length` tokens after `start`."""
    distribution = rows[start].astype(np.float64)
    for _ in range(length - 1):
        distribution = distribution[..., None] * rows.astype(np.float64)
    return distribution


def sampled_triples(drafter, rows, count=20_000, verifier=None, **options):
    """Counts [V, V, V] of the first three sampled tokens after token 0 of a Markov target."""
    vocab = len(rows)
    prompts = (jnp.zeros((count, 4), jnp.int32), jnp.full((count,), 4))  # repeated zeros: n-grams recur
    result = decode(
        markov(rows),
        drafter,
        prompts,
        key=jax.random.key(7),
        max_new_tokens=3,
        temperature=1.0,
        verifier=verifier,
        **options,
    )
    index = np.asarray(result.tokens) @ np.array([vocab**2, vocab, 1])
    return np.bincount(index, minlength=vocab**3).reshape((vocab,) * 3)


def pairs_after(drafter_of, layers: int = 3, *, target: Target | None = None, **options):
    """Counts [3, 3] of two tokens of a vocabulary of 3 that a tiny Llama samples, by `drafter_of(target)`, the law that
    the target says of them, and the result."""
    target = tiny_llama(layers=layers, vocab=3, stacked=True) if target is None else target
    options = {"samples_per_prompt": 128, "temperature": 2.0} | options
    result = decode(
        target, drafter_of(target), [[1, 2]], key=jax.random.key(3), max_new_tokens=2, **options
    )  # fmt: skip
    first, second = np.asarray(result.to_lists()).T
    chains = jnp.asarray([[1, 2, token] for token in range(3)])
    logits = target.model.forward(
        target.params, chains, target.model.init_cache(target.params, None, 3, 128),
        positions=jnp.broadcast_to(jnp.arange(3), (3, 3)), mask=jnp.tril(jnp.ones((3, 3, 3), bool)),
    )[0].logits  # fmt: skip
    p = np.asarray(jax.nn.softmax(logits / 2.0))
    return np.bincount(first * 3 + second, minlength=9).reshape(3, 3), p[0, 1][:, None] * p[:, 2], result


def chi_square(counts, distribution):
    """p-value of counts against a distribution, cells expecting fewer than 5 merged."""
    expected = distribution.ravel() * counts.sum()
    observed, small = counts.ravel(), expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    return chisquare(observed, expected, sum_check=False).pvalue
