"""The rules of Whisper's times beside those of `transformers`, along random texts and in trees."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processed import begun, in_a_tree, random_tree
from toy import branching_drafter, markov

from specjax import UsageError, decode, drafters, processors
from specjax.processors import pipeline

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

module = importlib.import_module("specjax.processors.timestamps")  # the package has a function of this name

VOCAB, END, NO_TIMES, START = 24, 10, 13, 11
"""Text has the ids below 10, times those from 14 on."""
FIRST = NO_TIMES + 1


def their_processors(max_initial, begin):
    """Return the processors of transformers in the order in which Whisper runs them."""
    lp = transformers.generation.logits_process
    config = transformers.GenerationConfig(eos_token_id=END)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = NO_TIMES, max_initial
    return [
        lp.SuppressTokensAtBeginLogitsProcessor([3, END], begin),
        lp.SuppressTokensLogitsProcessor([5, 6]),
        lp.WhisperTimeStampLogitsProcessor(config, begin_index=begin),
    ]


def their_logits(text, logits, max_initial):
    """Return the logits after the prompt START and a text."""
    ids, scores = torch.tensor([[START, *text]]), torch.tensor(np.asarray(logits))[None]
    for processor in their_processors(max_initial, 1):
        scores = processor(ids, scores)
    return scores[0].numpy()


def our_processors(max_initial):
    return (
        processors.min_length(1, [3, END]), processors.ban([5, 6]),
        processors.timestamps(NO_TIMES, END, max_initial=max_initial),
    )  # fmt: skip


def random_text(rng, length, max_initial):
    """Return a text of which about half of the tokens are times, drawn from what the rules allow."""
    text = []
    for _ in range(length):
        logits = rng.normal(size=VOCAB) + np.where(np.arange(VOCAB) >= FIRST, rng.choice([-2, 1]), 0)
        logits[END] = -9
        allowed = their_logits(text, logits.astype(np.float32), max_initial)
        text.append(int(np.argmax(allowed)))
    return text


@pytest.mark.parametrize("max_initial", [None, 2])
def test_random_texts(max_initial):
    """The logits after every prefix are those of transformers; both kinds of segments' ends occur."""
    rng = np.random.default_rng(0)
    ours = our_processors(max_initial)
    process = jax.jit(lambda states, token, logits: pipeline.process_root(ours, states, token, logits))
    update = jax.jit(lambda states, tokens: pipeline.update_states(ours, states, tokens, jnp.array([1])))
    forced = 0
    for _ in range(12):
        text = random_text(rng, 9, max_initial)
        states, prompt = pipeline.init_states(ours, jnp.array([[START]]), jnp.array([1]), VOCAB), [START]
        for place in range(len(text) + 1):
            logits = rng.normal(size=VOCAB).astype(np.float32) * 2
            expected = their_logits(text[:place], logits, max_initial)
            result = process(states, jnp.array([[[*prompt, *text[:place]][-1]]]), jnp.asarray(logits)[None])[0]
            np.testing.assert_array_equal(np.asarray(result), expected)
            forced += place > 0 and np.isinf(expected[:END]).all()
            if place < len(text):
                states = update(states, jnp.array([[text[place]]]))
    assert forced > 10, "the rule of the sum, or of one time after text, was used"


def nodes_of_trees(max_initial, seeds):
    """Yield a text, the path to a node of a random tree after it, and the logits of the node, ours and raw."""
    processor = processors.timestamps(NO_TIMES, END, max_initial=max_initial)
    rng = np.random.default_rng(1)
    for seed in range(seeds):
        text = random_text(rng, seed % 4, max_initial)
        tree = random_tree(rng, 1, 8, VOCAB)
        times = rng.integers(FIRST, VOCAB, tree.tokens.shape)
        tree = tree._replace(tokens=jnp.where(rng.random(tree.tokens.shape) < 0.5, tree.tokens, times))
        logits = jnp.asarray(rng.normal(size=(1, 8, VOCAB)), jnp.float32)
        state = begun(processor, np.array([[START]]), np.array([1]), VOCAB)
        for token in text:
            state = processor.update(processor.params, state, jnp.array([[token]]), jnp.array([1]))
        ours, parents = np.asarray(in_a_tree(processor, state, tree, logits)), np.asarray(tree.parents)[0]
        for node in range(8):
            if tree.valid[0, node]:
                path, at = [], node
                while at > 0:
                    path, at = [int(tree.tokens[0, at]), *path], parents[at]
                yield text, path, ours[0, node], np.asarray(logits[0, node])


def agrees(max_initial=2, seeds=12):
    """Return True if every node of the trees has the logits of transformers."""
    lp = their_processors(max_initial, 1)[2]
    for text, path, ours, logits in nodes_of_trees(max_initial, seeds):
        theirs = lp(torch.tensor([[START, *text, *path]]), torch.tensor(logits)[None])[0].numpy()
        if not np.array_equal(ours, theirs):
            return False
    return True


def test_every_node_of_random_trees():
    assert agrees() and agrees(None)


@pytest.mark.parametrize("fault", ["the first time again", "no pairs", "the sum"])
def test_wrong_rules_are_caught(fault, monkeypatch):
    restrict = module._restrict

    def wrong(rules, times, logits):
        if fault == "the first time again":
            times = times._replace(latest=jnp.where(times.last, times.latest, times.latest - 1))
        if fault == "no pairs":
            times = times._replace(before_last=jnp.ones_like(times.last))
        if fault == "the sum":
            is_time = jnp.arange(logits.shape[2]) >= rules.first
            below = jnp.max(jnp.where(is_time, -jnp.inf, logits), -1, keepdims=True)
            logits = jnp.where(is_time, jnp.minimum(logits, below - 9), logits)
        return restrict(rules, times, logits)

    monkeypatch.setattr(module, "_restrict", wrong)
    jax.clear_caches()
    assert not agrees()
    jax.clear_caches()


def test_texts_of_trees_are_those_of_plain_decoding():
    """A drafter with branches, which drafts forbidden tokens too, leaves the text as it is."""
    table = np.random.default_rng(0).dirichlet(np.full(VOCAB, 0.5), VOCAB).astype(np.float32)
    options = {"key": 0, "processors": our_processors(3), "max_new_tokens": 24, "eos": END}
    tree = branching_drafter((3, 2)).replace(params=jnp.asarray(table))
    for temperature in (0.0, 1.0):
        more = options | {"temperature": temperature, "sampling": "coupled"}
        plain, ours = (
            decode(markov(table), who, [[START], [START, 4]], **more) for who in (drafters.autoregressive(), tree)
        )
        assert ours.to_lists() == plain.to_lists() and ours.stats.accepted.sum() > 0
        for text in plain.to_lists():
            times = [token for token in text if token >= FIRST]
            assert FIRST <= text[0] <= FIRST + 3 and times == sorted(times)


def test_wrong_ids_are_refused():
    with pytest.raises(UsageError, match="no_timestamps as a whole number"):
        processors.timestamps(-1, 3)
    with pytest.raises(UsageError, match="has 24 tokens"):
        decode(
            markov(np.full((VOCAB, VOCAB), 1 / VOCAB, np.float32)), "autoregressive", [[1]], key=0, max_new_tokens=2,
            processors=[processors.timestamps(VOCAB, 3)],
        )  # fmt: skip
