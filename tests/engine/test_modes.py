"""Under 64-bit types and strict promotion every tree, rule and loop gives the texts that it gives without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive
from toy import markov, tiny_llama, tiny_llama_alike
from toy_decoders import exact, linear
from unusual_modes import unusual_modes

from specjax import Request, decode, decoders, drafters, serve, stream, trees, verifiers
from specjax.persistence import Checkpoints
from specjax.trees.operations import chain
from specjax.types import TokenTree

PROMPTS = [[1, 2, 3, 1, 2], [5], [7, 7, 7]]
RULES = [
    ("2x2", verifiers.recursive_rejection),
    exhaustive("1x1x1", verifiers.block),
    exhaustive("1x1x1", verifiers.traversal),
    exhaustive("paths:2x2", verifiers.specinfer),
    exhaustive("paths:2x2", verifiers.spectr),
    exhaustive("paths:2x2", verifiers.multipath_block(2)),
    exhaustive("mixed:2x1", verifiers.greedy_multi_draft),
    exhaustive("dyspec:3x2", verifiers.recursive_rejection),
    exhaustive("beam:3x2", verifiers.recursive_rejection),
    exhaustive("eagle2:2x2x4", verifiers.sample_and_match),
    exhaustive("1x1x1", verifiers.VERIFIERS["typical"]),
    exhaustive("1x1x1", verifiers.VERIFIERS["rollback"]),
]


def same(run):
    """Check that `run()` gives the same with and without the unusual modes."""
    narrow = run()
    with unusual_modes():
        assert jnp.zeros(1).dtype == jnp.float64
        wide = run()
    jax.tree.map(np.testing.assert_array_equal, wide, narrow)
    return narrow


@pytest.mark.parametrize(("tree", "rule"), RULES)
def test_trees_of_two_models_under_their_rules(tree, rule):
    drafter = drafters.two_model(tiny_llama_alike(), tree=trees.parse(tree))
    for temperature in (0.0, 0.8):
        options = {"temperature": temperature, "top_k": 20, "top_p": 0.9} if temperature else {}
        run = functools.partial(
            decode, tiny_llama(), drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=12, eos=(27,),
            verifier=rule if temperature else None, logprobs=True, **options,
        )  # fmt: skip
        result = same(lambda run=run: (run().tokens, run().logprobs, run().stats))
        assert result[0].dtype == jnp.int32


def test_requests_that_come_and_go():
    drafter = drafters.two_model(tiny_llama_alike(), 3)

    def run():
        texts = [[] for _ in PROMPTS]
        requests = (Request(prompt, n, 8) for n, prompt in enumerate(PROMPTS))
        options = {"slots": 2, "longest_prompt": 5, "max_new_tokens": 8, "temperature": 0.7}
        for news in serve(tiny_llama(), drafter, requests, **options):
            texts[news.request] += news.tokens
        return texts

    assert all(len(text) == 8 for text in same(run))


@pytest.mark.exhaustive
def test_a_stream_that_is_resumed(tmp_path):
    folders = iter(range(2))

    def run():
        texts, folder = [[] for _ in PROMPTS], tmp_path / str(next(folders))
        steps = lambda: stream(
            tiny_llama(), "token_recycling", PROMPTS, checkpoint=Checkpoints(folder, every=2), key=3,
            max_new_tokens=10, temperature=0.7,
        )  # fmt: skip
        first = steps()
        for _ in range(4):
            next(first)
        first.close()
        for step in steps():
            for row, new in zip(texts, step.tokens, strict=True):
                row += new
        return texts

    same(run)


@pytest.mark.parametrize("temperature", [exhaustive(0.0), 0.7])
def test_pearl(temperature):
    target, draft = tiny_llama(), jax.device_put(tiny_llama_alike(), jax.devices()[1])
    options = {"key": jax.random.key(0), "max_new_tokens": 8, "num_tokens": 3, "temperature": temperature}
    same(lambda: decoders.pearl(target, draft, PROMPTS, **options).to_lists())


def test_the_other_loops():
    uniform = np.full((4,) * 3, 4**-3.0)
    blank = np.zeros((2, 3), np.int32), np.ones((2, 3), bool)
    same(lambda: decoders.any_subset(exact(uniform), *blank, key=jax.random.key(0), window=2).filled)
    model = linear([0.5, 0.5], [0.3, 0.4])
    same(lambda: decoders.continuous(model, model, np.zeros((2, 1, 1)), key=0, max_new_tokens=4, window=2).tokens)
    same(lambda: decoders.superposed(markov(), [[0], [1, 2]], max_new_tokens=4, drafts=2, candidates=3).tokens)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error")
def test_parameters_of_64_bits():
    """A built-in model and its draft, as a checkpoint of float64 gives them; nobody is warned of what is cut."""
    prompt, options = [[1, 2, 3, 1]], {"key": 3, "max_new_tokens": 6}
    run = lambda target, draft: decode(target, drafters.two_model(draft, 1), prompt, **options).to_lists()
    pair = tiny_llama(), tiny_llama_alike()
    wanted = run(*pair)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), pair)
        assert jax.tree.leaves(wide)[0].dtype == jnp.float64
        assert run(*wide) == wanted


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["standard", "traversal", exhaustive("spectr"), "greedy", "sample_and_match"])
def test_a_rule_called_with_64_bits(name):
    """A node, a token, a logit: what JAX makes of numbers under that flag."""
    rule, shape = verifiers.VERIFIERS[name], (2, 3)
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(2, *shape, 4))

    def run():
        keys = jax.random.split(jax.random.key(0), 2)
        tokens, above = jnp.asarray(np.ones(shape, int)), jnp.asarray([[-1, 0, 1]] * 2)
        return rule(keys, TokenTree(tokens, above, jnp.ones(shape, bool), jnp.asarray(q)), jnp.asarray(p))

    same(run)


def test_a_rule_called_by_hand():
    drafted = jnp.zeros((3, 2), jnp.int32), jnp.ones((3, 2), bool), jnp.zeros((3, 2, 4))
    tree = chain(*drafted)
    same(lambda: verifiers.standard(jax.random.split(jax.random.key(0), 3), tree, drafted[2]))
