"""Tests that a processor makes of a node what plain decoding makes of the text that ends there."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processed import begun, by_row, in_a_tree, one_by_one, random_tree, some
from tiers import exhaustive
from toy import DRAFT_ROWS, TARGET_ROWS, branching_drafter, chi_square, markov, sampled_triples, tiny_llama
from toy import tiny_llama_alike as alike

from specjax import decode, drafters, processors, trees
from specjax.engine import run
from specjax.numerics.sampling import row_keys
from specjax.trees import operations

VOCAB, NODES = 7, 9
PROMPT, LENGTH = np.array([[1, 3, 3, 5, 0], [2, 2, 1, 6, 4]], np.int32), np.array([4, 5], np.int32)


def of_tree(name, seed, ignore=False):
    """Process a random tree and logits: return the result by the tree, and that of one node after another."""
    rng, processor = np.random.default_rng(seed), some(VOCAB)[name]
    tree = random_tree(rng, 2, NODES, VOCAB)
    logits = jnp.asarray(rng.normal(size=(2, NODES, VOCAB)), jnp.float32)
    state = begun(processor, PROMPT, LENGTH, VOCAB)
    ours = np.asarray(in_a_tree(processor, state, tree, logits, ignore))
    valid = np.asarray(tree.valid)
    return ours[valid], one_by_one(processor, state, tree, logits)[valid]


@pytest.mark.parametrize("name", some(VOCAB))
def test_every_node_of_random_trees(name):
    for seed in range(3):
        ours, plain = of_tree(name, seed)
        np.testing.assert_allclose(ours, plain, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(some(VOCAB).keys() - {"bias"}))
def test_one_that_does_not_look_up_the_tree_is_caught(name):
    ours, plain = of_tree(name, 0, ignore=True)
    assert not np.allclose(ours, plain, atol=0.3)


@pytest.mark.parametrize("name", some(VOCAB))
def test_one_row_is_that_of_all_rows(name):
    """A verifier reads the logits of the nodes that it visits, one per row of the batch."""
    rng, processor = np.random.default_rng(4), some(VOCAB)[name]
    assert processor.by_row
    tree = random_tree(rng, 2, NODES, VOCAB)
    logits = jnp.asarray(rng.normal(size=(2, NODES, VOCAB)), jnp.float32)
    state = begun(processor, PROMPT, LENGTH, VOCAB)
    ancestors = operations.ancestor_mask(tree.parents, tree.valid)
    every = np.asarray(in_a_tree(processor, state, tree, logits))
    of_some = jax.jit(lambda above, rows: processor.process(processor.params, state, tree, above, rows))
    for nodes in rng.integers(0, NODES, (6, 2, 3)):  # three nodes per row
        at = lambda x, nodes=nodes: np.take_along_axis(np.asarray(x), nodes[..., None], 1)
        valid = np.take_along_axis(np.asarray(tree.valid), nodes, 1)
        np.testing.assert_allclose(of_some(at(ancestors), at(logits))[valid], at(every)[valid], rtol=1e-6)


PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], [7, 7, 7]]
MANY = np.random.default_rng(0).dirichlet(np.full(12, 0.4), 12).astype(np.float32)
BRANCHING = branching_drafter((3, 2)).replace(params=jnp.asarray(MANY))
# A greedy row and two with the target's own noise.
OPTIONS = {"max_new_tokens": 20, "eos": 0, "temperature": jnp.array([0.0, 0.8, 1.2]), "sampling": "coupled"}
DRAFTERS = {
    "prompt_lookup": lambda: drafters.prompt_lookup(4, min_ngram=1),
    "token_recycling": lambda: drafters.token_recycling(64, num_nodes=12),
    "jacobi": lambda: drafters.jacobi(64, window=4),
    "chain": lambda: drafters.two_model(alike(), 3),
    "tree": lambda: drafters.two_model(alike(), tree=trees.parse("3x2x1")),
    "beam": lambda: drafters.two_model(alike(), tree=trees.parse("beam:3x2")),
    "eagle2": lambda: drafters.two_model(alike(), tree=trees.parse("eagle2:2x2x4")),
    "early_exit": lambda: drafters.early_exit(tiny_llama(), exit_layer=1, num_tokens=3),
}


def check_texts(target, vocab, drafter):
    """Check that texts with all processors at once are those of plain decoding, and return them."""
    options = OPTIONS | {"key": jax.random.key(0), "processors": by_row(vocab), "min_p": 0.02}
    plain, ours = (decode(target, who, PROMPTS, **options) for who in (drafters.autoregressive(), drafter))
    assert ours.to_lists() == plain.to_lists()
    assert ours.finite.all() and ours.stats.accepted.sum() > 0
    return ours.to_lists()


def test_texts_are_those_of_plain_decoding():
    texts = check_texts(markov(MANY), 12, BRANCHING)
    for text in texts[:2]:  # of the automaton
        assert sum(token % 2 == 0 for token in text) % 2 == (text[-1] == 0) or len(text) == 20
        assert not any(a == b and a % 2 for a, b in itertools.pairwise(text))
    compiled = run.run._cache_size()
    order = (1, 2, 0)
    turned = [PROMPTS[row] for row in order]
    options = OPTIONS | {"temperature": OPTIONS["temperature"][jnp.array(order)], "min_p": 0.02}
    keys = row_keys(jax.random.key(0), 3)[jnp.array(order)]
    again = decode(markov(MANY), BRANCHING, turned, key=keys, processors=by_row(12, order), **options)
    assert again.to_lists() == [texts[row] for row in order]  # rows know nothing of each other
    assert run.run._cache_size() == compiled  # settings are data


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_of_a_language_model(name):
    check_texts(tiny_llama(), 64, DRAFTERS[name]())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_texts_of_a_language_model(name):
    options = {"key": jax.random.key(0), "processors": by_row(64), "max_new_tokens": 20, "eos": 0}
    plain, ours = (
        decode(tiny_llama(), who, PROMPTS, **options) for who in (drafters.autoregressive(), DRAFTERS[name]())
    )
    assert ours.to_lists() == plain.to_lists()


def law(change) -> np.ndarray:
    """[V, V, V]: of three tokens after four zeros, each drawn from the target's row after `change(text, logits)`."""
    vocab = len(TARGET_ROWS)
    out = np.zeros((vocab,) * 3)
    for text in itertools.product(range(vocab), repeat=3):
        out[text] = 1.0
        for i, token in enumerate(text):
            prefix = text[:i]
            with np.errstate(divide="ignore"):
                x = change(prefix, np.log(TARGET_ROWS[prefix[-1] if prefix else 0].astype(np.float64)))
            p = np.exp(x - np.max(x))
            out[text] *= p[token] / p.sum()
    return out


def penalised(new, x):
    """Repetition by 1.5, prompt included, then frequency by 0.8, without."""
    x = np.array([(v / 1.5 if v > 0 else v * 1.5) if t in (0, *new) else v for t, v in enumerate(x)])
    return x - 0.8 * np.array([new.count(t) for t in range(len(x))])


PENALTIES = processors.repetition(1.5), processors.frequency(0.8)
RULES = [("recursive_rejection", (2, 2)), exhaustive("traversal", (2, 2)), exhaustive("standard", (1, 1))]


@pytest.mark.parametrize(("rule", "shape"), RULES)
def test_the_law_of_a_sampled_tree(rule, shape):
    """The law is the enumerated one, and another one than that of processors that do not look up the tree, and of
    none."""
    drafter = branching_drafter(shape).replace(params=jnp.asarray(DRAFT_ROWS))
    if rule == "standard":
        drafter = drafter.replace(traits=drafter.traits._replace(draws="chain"))
    counts = sampled_triples(drafter, TARGET_ROWS, verifier=rule, processors=PENALTIES)
    assert chi_square(counts, law(penalised)) > 1e-3
    assert chi_square(counts, law(lambda new, x: penalised((), x))) < 1e-6
    assert chi_square(counts, law(lambda new, x: x)) < 1e-6
