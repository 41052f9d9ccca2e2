"""What the loop does for every head: which features it reads, and which it forgets.

Verification hides all of it: whatever a head reads, the text is right. So these tests look at its memory and at how
often it is.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import layer_of, tiny_head
from tiers import exhaustive, those
from toy import markov, tiny_llama

from specjax import UsageError, decode, drafters, make_drafter, trees
from specjax.drafters.heads import learned
from specjax.engine import run as engine
from specjax.engine.prepare import Settings, prepare
from specjax.models.heads import blocks
from specjax.models.heads.contract import DraftHead, Pairs
from specjax.models.heads.eagle import Eagle, EagleConfig, eagle_head
from specjax.types import Context

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7, 7]]


def after_rounds(name, **options):
    """(head, job, state) once every row has had some rounds; those end at different times."""
    head = tiny_head(name, tiny_llama())
    drafter = make_drafter(name, tiny_llama(), head, **options)
    # Hot and with the target's own noise: what a random head drafts is accepted now and then.
    return head, *run_rounds(drafter, Settings(temperature=4.0, sampling="coupled"))


def run_rounds(drafter, settings, rounds=6, new=24, longest=1):
    """(job, state); a round must have accepted more than `longest` tokens."""
    job = prepare(tiny_llama(), drafter, PROMPTS, settings, key=jax.random.key(1), max_new_tokens=new)
    state = engine.start(job)
    lengths = [np.array(state.length)]
    for _ in range(rounds):
        state, _, _ = engine.step(job.parts, state)
        lengths.append(np.array(state.length))
    accepted = np.diff(lengths, axis=0)
    assert accepted.max() > longest, "no draft was accepted: the test shows nothing"
    return job, state


def read_at_once(head, job, state):
    """The memory of a head that reads the whole text in one go, with the features of one pass of the target."""
    target, tokens = job.parts.target, state.tokens
    context = Context(tokens, state.length, target=target)
    batch, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
    taps = {"taps": head.head.taps} if head.head.taps else {}
    cache = target.model.begin(target.params, None, batch, size)
    output, _ = target.model.forward(target.params, tokens, cache, positions=positions, mask=mask, **taps)
    memory = head.head.begin(head.params, context, batch, 2 * size)
    pairs = Pairs(head.head.features_of(output), jnp.roll(tokens, -1, 1), state.length - 1)
    return head.head.read(head.params, memory, pairs, context)


def differs(head, job, state, own=lambda draft: draft) -> float:
    """How far the memory of the loop, once it has read the last round, is from that of the whole text.

    own: the state of the head in that of the drafter."""
    drafter = job.parts.drafter
    context = Context(state.tokens, state.length, cache=state.cache, target=job.parts.target)
    _, draft = drafter.propose(drafter.params, None, state.draft, context, jnp.zeros_like(state.length))
    draft = own(draft)
    np.testing.assert_array_equal(draft.held, state.length - 1)
    ours, whole = draft.memory, read_at_once(head, job, state)

    def apart(axis, one, other):
        worst = 0.0
        for b, held in enumerate(np.asarray(draft.held)):
            a, c = (np.take(np.asarray(x, np.float32), b, axis) for x in (one, other))
            if a.ndim == 3:  # [K, S, h] of a cache: what lies beyond the text is never read
                a, c = a[:, :held], c[:, :held]
            worst = max(worst, float(np.abs(a - c).max()))
        return worst

    return max(jax.tree.leaves(jax.tree.map(apart, head.head.axes(ours), ours, whole)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clover", {}),
        ("dflash", {}),
        ("eagle", {"tree": trees.branching("2x2x1")}),
        ("eagle3", {}),
        ("hydra", {}),
        *(exhaustive(name, {}) for name in ("chimera", "clover", "kangaroo", "medusa", "p_eagle")),
        *(exhaustive(name, {"tree": trees.branching("2x2x1")}) for name in ("falcon", "hidden_transfer")),
    ],
)
def test_a_head_remembers_the_text_as_if_it_had_read_it_at_once(name, options):
    assert differs(*after_rounds(name, **options)) < 1e-4


def test_a_head_remembers_what_others_drafted_too():
    """Retrieved text reaches further down than the head's own tree of two levels."""
    head = tiny_head("eagle", tiny_llama())
    drafter = make_drafter("rasd", tiny_llama(), head, tree=trees.parse("top:2x1"), prune=False)
    job, state = run_rounds(drafter, Settings(), new=40, rounds=10, longest=3)
    assert differs(head, job, state, lambda draft: draft.model) < 1e-4


def of_the_token_before(drafter):
    """A mutant: each token gets the feature of the one before it on the path."""

    def observe(*arguments):
        pairs = drafter.observe(*arguments)
        return pairs._replace(features=jnp.roll(pairs.features, 1, 1))

    return observe


def of_rejected_nodes(drafter):
    """A mutant: features of the first nodes of the tree, accepted or not."""

    def observe(params, state, context, tree, verdict, output):
        first = jnp.where(verdict.path >= 0, jnp.arange(verdict.path.shape[1]), -1)
        return drafter.observe(params, state, context, tree, verdict._replace(path=first), output)._replace(
            tokens=drafter.observe(params, state, context, tree, verdict, output).tokens
        )

    return observe


@pytest.mark.parametrize("name", those({"eagle"}, ["eagle", "falcon", "hidden_transfer"]))
@pytest.mark.parametrize("mutant", [of_the_token_before, of_rejected_nodes])
def test_features_of_other_tokens_are_caught(mutant, name, monkeypatch):
    functions = learned._functions
    monkeypatch.setattr(
        learned, "_functions", functools.cache(lambda *a: (d := functions(*a)).replace(observe=mutant(d)))
    )
    assert differs(*after_rounds(name, tree=trees.branching("2x2x1"))) > 1e-2


def permutation(vocab=7, shift=3):
    """A target that always says the same next token, and the map of its logits from one token to the next."""
    rows = np.full((vocab, vocab), 1e-6, np.float32)
    following = (np.arange(vocab) + shift) % vocab
    rows[np.arange(vocab), following] = 1.0
    move = np.zeros((vocab, vocab), np.float32)
    move[following, np.arange(vocab)] = 1.0
    return markov(rows), move


def knowing(target, token, feature) -> DraftHead:
    """An EAGLE head whose layers add nothing: it says token @ E x_{t+1} + feature @ f_t."""
    config = EagleConfig(layer_of(target))
    params = jax.tree.map(np.asarray, blocks.init_params(Eagle, config, jax.random.key(0)))
    layer = params["stack"][0]
    layer["attention"]["o"]["weight"], layer["mlp"]["down"]["weight"] = (
        np.zeros_like(layer[part][last]["weight"]) for part, last in (("attention", "o"), ("mlp", "down"))
    )
    params["fc"]["weight"] = np.concatenate([token, feature], 1)
    return DraftHead(eagle_head(config), params)


@pytest.mark.parametrize("knows_by", ["token", "feature"])
def test_a_head_that_knows_the_target_is_always_right(knows_by):
    """From the token after a feature as well as from the feature itself: so each stands where it belongs."""
    target, move = permutation()
    none = np.zeros_like(move)
    head = knowing(target, 30 * move, none) if knows_by == "token" else knowing(target, none, move)
    prompts = [[0], [1, 4], [3, 6, 2, 5, 1]]
    result = decode(target, drafters.eagle(head, 4), prompts, key=0, max_new_tokens=20)
    assert result.to_lists() == decode(target, "autoregressive", prompts, key=0, max_new_tokens=20).to_lists()
    # A text of one token has no feature yet: its first round drafts from nothing.
    assert result.stats.target_passes.tolist() == [5, 4, 4]


def test_a_tree_deeper_than_the_head_is_refused():
    with pytest.raises(UsageError, match="the tree is 4 tokens deep, but the head drafts 3"):
        make_drafter("medusa", tiny_llama(), tiny_head("medusa", tiny_llama()), num_tokens=4)
