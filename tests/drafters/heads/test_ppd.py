"""Prompts in the target pass: the guesses for the next step, their number, and the passes that they save."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import config_of, tiny_head
from toy import markov, tiny_llama

from specjax import METHODS, UsageError, costs, decode, make_drafter
from specjax.drafters.default import default_drafter
from specjax.drafters.heads import ppd
from specjax.engine import run as engine
from specjax.engine.prepare import Settings, prepare
from specjax.models.heads.agreement import prompted_features
from specjax.models.heads.kinds import KINDS, TRAINABLE
from specjax.types import Context

ACCURACY = ((0.5, 0.2), (0.4, 0.2), (0.3, 0.1))
OPTIONS = {"num_nodes": 16, "accuracy": ACCURACY, "costs": (1.0,) * 16}
TEXTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7, 7]]
SIZE = 60


def of_the_token_before(drafter):
    """Make a mutant that reads the outputs below the last accepted node's parent."""
    return lambda params, state, context, tree, verdict, output: drafter.observe(
        params, state, context, tree, verdict._replace(num_nodes=jnp.maximum(verdict.num_nodes - 1, 1)), output
    )


def of_rejected_nodes(drafter):
    """Make a mutant that takes the first nodes of the tree for the accepted ones."""
    first = lambda path: jnp.where(path >= 0, jnp.arange(path.shape[1]), -1)
    return lambda params, state, context, tree, verdict, output: drafter.observe(
        params, state, context, tree, verdict._replace(path=first(verdict.path)), output
    )


@functools.cache
def beside_mutants(drafter):
    """Return a drafter with a tuple of states: its own, which acts, and those of both mutants."""
    observers = drafter.observe, of_the_token_before(drafter), of_rejected_nodes(drafter)
    of_first = lambda function: lambda params, state, *arguments: function(params, state[0], *arguments)

    def propose(params, keys, state, *arguments):
        tree, first = drafter.propose(params, keys, state[0], *arguments)
        return tree, (first, *state[1:])

    return drafter.replace(
        init=lambda *arguments: (drafter.init(*arguments),) * 3,
        propose=propose,
        hooks=drafter.hooks._replace(soft_prompts=of_first(drafter.hooks.soft_prompts)),
        observe=lambda params, state, *arguments: tuple(observe(params, state[0], *arguments) for observe in observers),
    )


@jax.jit
def said_at_once(target, head, tokens, length):
    """Return the logits float32[m, V] of one pass over the text, at the prompts below the token before the root."""
    hidden = prompted_features(target, head, tokens[None, :SIZE])[:, length - 2]
    context = Context(tokens[None], length[None], target=target)
    return head.head.start(head.params, hidden, context, 2)[0].logits[0]


def test_guesses_are_those_of_the_last_accepted_token_as_if_the_text_were_read_at_once():
    """No text can show errors here, so the test must reject both mutants."""
    target = tiny_llama(layers=1)
    head = tiny_head("ppd", target)
    drafter = make_drafter("ppd", target, head, num_nodes=12, accuracy=ACCURACY, costs=(1.0,) * 12)
    tested = beside_mutants(drafter.replace(params=())).replace(params=drafter.params)
    job = prepare(target, tested, TEXTS, Settings(), key=jax.random.key(1), max_new_tokens=28)
    state, apart, states = engine.start(job), np.zeros(3), set()
    for _ in range(14):
        previous = np.asarray(state.length)
        state, _, _ = engine.step(job.parts, state)
        tokens, length, draft = jax.tree.map(np.asarray, (state.tokens, state.length, state.draft))
        for row in np.flatnonzero(length - previous > 1):  # a draft was accepted
            logits = np.asarray(said_at_once(target, head, tokens[row], length[row]))
            best = np.sort(logits, -1)[:, ::-1]
            for who, state_of in enumerate(draft):
                for distance in range(state_of.num_distances[row]):
                    guessed = logits[distance, state_of.guesses[row, distance]]
                    apart[who] = max(apart[who], np.abs(guessed - best[distance, : len(guessed)]).max())
            states.add(draft[0].num_distances[row].item())
    assert len(states) > 1, "the test shows nothing"
    assert apart[0] < 1e-3 and apart[1] > 1e-1 and apart[2] > 1e-1


def test_guesses_that_are_always_right_save_the_passes_that_the_plan_says():
    """The target predicts one token for every input, so also for every prompt vector."""
    rows = np.full((4, 4), 1e-6, np.float32)
    rows[:, 2] = 1.0
    target = markov(rows)
    head = tiny_head("ppd", target)
    head = head.replace(params=jax.tree.map(jnp.abs, head.params))  # the toy mixes its rows by these
    drafter = make_drafter("ppd", target, head, **OPTIONS)
    _, shapes = ppd.plan_trees(head.head, **OPTIONS)
    passes, length, state = 0, 0, 0
    while length < 20:
        prompts = dict(zip(((), *shapes[state].paths), shapes[state].prompts, strict=True))
        path = max((path for path in prompts if not any(path)), key=len)
        passes, length, state = passes + 1, length + len(path) + 1, prompts[path]
    result = decode(target, drafter, [[0], [1, 3]], key=0, max_new_tokens=20)
    assert result.to_lists() == [[2] * 20] * 2
    assert result.stats.target_passes.tolist() == [passes] * 2 and passes < 12


def test_the_tree_is_that_of_the_costs():
    """The cost curves are those of a chip with free wide passes, of a CPU, and a measured one."""
    head = tiny_head("ppd", tiny_llama())
    widest = lambda **options: max(shape.size(2) for shape in ppd.plan_trees(head.head, **options)[1])
    assert widest(platform="tpu") > 40 > 16 >= widest(platform="cpu")
    assert widest(costs=costs.curves.Curve((1, 8, 9, 64), (1.0, 1.0, 4.0, 4.5)), num_nodes=64) == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_nodes": 3}, r"num_nodes must be at least 4 \(root, candidate, a prompt of 2\), not 3"),
        ({"accuracy": ((0.5,),) * 4}, "accuracy has 4 distances, but the head has prompts for 3"),
        ({"num_nodes": 257}, "num_nodes must be at most 256, since planning takes seconds there, not 257"),
        ({"num_nodes": 8, "costs": (1.0,) * 7 + (float("nan"),)}, r"one positive number per token of a pass \(8\)"),
        ({"num_nodes": 8, "costs": (1.0,) * 7}, r"one positive number per token of a pass \(8\)"),
        ({"accuracy": ((0.9, 0.3),)}, "sum to at most 1"),
    ],
)
def test_what_cannot_be_drafted_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        make_drafter("ppd", tiny_llama(), tiny_head("ppd", tiny_llama()), **options)


def test_no_other_method_grows_a_tree_with_prompts():
    head = tiny_head("ppd", tiny_llama())
    with pytest.raises(UsageError, match=r"a ppd head drafts in the target pass, .* choose method ppd"):
        make_drafter("rasd", tiny_llama(), head)


def test_given_alone_it_is_its_own_method():
    """`auto` accepts the other heads, but its passes have no prompts."""
    head = tiny_head("ppd", tiny_llama())
    with pytest.raises(UsageError, match="drafts in the target's own pass; choose method ppd"):
        make_drafter("auto", tiny_llama(), head)
    assert default_drafter(tiny_llama(), head)[0] == make_drafter("ppd", tiny_llama(), head)
    heads = {kind: KINDS[kind].head(config_of(kind, tiny_llama())) for kind in TRAINABLE}
    assert {kind for kind in heads if METHODS[kind].alone} == {kind for kind in heads if heads[kind].soft_prompts}
