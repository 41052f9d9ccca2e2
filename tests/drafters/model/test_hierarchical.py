"""Three models: golden distribution, limits, and the caches of the two inner ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive
from toy import (
    DRAFT_ROWS,
    MARKOV,
    TARGET_ROWS,
    branching_drafter,
    chi_square,
    joint_distribution,
    markov,
    pairs_after,
    quantized,
    sampled_triples,
    tiny_llama,
    tiny_llama_alike,
)

from specjax import UsageError, decode, stream, trees
from specjax.drafters import autoregressive, hierarchical, prompt_lookup, token_recycling, two_model
from specjax.engine.prefill import CHUNK
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start, step
from specjax.types import Context, Controller, Target

MIDDLE_ROWS = np.array(MARKOV["mid_rows"], np.float32)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7]]


def toy(min_tokens=2, own_token=True):
    inner = two_model(markov(DRAFT_ROWS), tree=trees.branching((2,)))
    return hierarchical(markov(MIDDLE_ROWS), inner, min_tokens=min_tokens, own_token=own_token)


@pytest.mark.parametrize(
    ("min_tokens", "own_token"),
    [exhaustive(1, True), (2, True), exhaustive(3, True), exhaustive(1, False), (2, False), exhaustive(3, False)],
)
def test_sampled_text_has_the_law_of_the_target(min_tokens, own_token):
    counts = sampled_triples(toy(min_tokens, own_token), TARGET_ROWS)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


def chance_of_accepted(min_tokens, own_token):
    """float64: the chances of 0, 1, ... accepted tokens of one pass on the toy, by enumeration in numpy.

    The inner draft is two children drawn without replacement.
    own_token: the chain starts with a token of the middle model's own; without, as in the golden row.
    """
    p, m, q = (rows.astype(np.float64) for rows in (TARGET_ROWS, MIDDLE_ROWS, DRAFT_ROWS))
    chances = np.zeros(min_tokens + 2)

    def target(chain, chance):
        """The target's test of a whole chain, which begins with the last token of the text."""
        for accepted, (previous, token) in enumerate(itertools.pairwise(chain)):
            passed = min(1.0, p[previous, token] / m[previous, token])
            chances[accepted] += chance * (1 - passed)
            chance *= passed
        chances[len(chain) - 1] += chance

    def middle(chain, chance):
        """Passes of the middle model: recursive rejection of two children and one token more, until it is enough."""
        if len(chain) > min_tokens:
            target(chain, chance)
            return
        for pair in itertools.permutations(range(3), 2):
            distribution, draft = m[chain[-1]], q[chain[-1]]
            left = chance * draft[pair[0]] * draft[pair[1]] / (1 - draft[pair[0]])
            for child in pair:
                passed = min(1.0, distribution[child] / draft[child])
                for token in range(3):
                    middle((*chain, child, token), left * passed * m[child, token])
                left *= 1 - passed
                if left == 0:
                    break
                distribution = np.maximum(distribution - draft, 0) / np.maximum(distribution - draft, 0).sum()
                draft = np.where(np.arange(3) == child, 0, draft) / (1 - draft[child])
            for token in np.flatnonzero(distribution) if left else ():
                middle((*chain, int(token)), left * distribution[token])

    if own_token:
        for token in range(3):
            middle((0, token), m[0, token])
    else:
        middle((0,), 1.0)
    return chances


def test_the_enumeration_is_the_golden_row():
    golden = MARKOV["hierarchical_min2"]
    chances = chance_of_accepted(2, own_token=False)
    np.testing.assert_allclose(chances, list(golden["accepted_length_pmf"].values()), atol=2e-6)
    np.testing.assert_allclose(chances @ (1 + np.arange(4)), golden["expected_tokens_per_iteration"], atol=2e-6)


@pytest.mark.parametrize(
    ("min_tokens", "own_token"), [(2, True), (2, False), exhaustive(3, True), exhaustive(3, False)]
)
def test_tokens_per_pass_are_those_of_the_enumeration(min_tokens, own_token):
    """Replay the golden row without the own token; with it the chains have other lengths."""
    distribution, rows = chance_of_accepted(min_tokens, own_token=own_token), 40_000
    prompts = (jnp.zeros((rows, 4), jnp.int32), jnp.full((rows,), 4))
    drafter = toy(min_tokens, own_token)
    step = next(stream(markov(), drafter, prompts, key=jax.random.key(5), max_new_tokens=8, temperature=1.0))
    counts = np.bincount(step.accepted, minlength=len(distribution))
    error = step.accepted.std() / rows**0.5
    assert abs(step.accepted.mean() - distribution @ np.arange(len(distribution))) < 4 * error < 0.03
    assert chi_square(counts, distribution) > 1e-3
    assert chi_square(counts, chance_of_accepted(min_tokens, own_token=not own_token)) < 1e-6  # another loop is caught


def test_replaced_middle_laws_are_caught():
    """Check that a mutant fails: the target verifies with the tiny drafter's q instead of the middle model's."""
    drafter = toy()

    def propose(params, keys, state, context, limit):
        tree, state = drafter.propose(params, keys, state, context, limit)
        return tree._replace(logits=jnp.log(params[1])[tree.tokens]), state

    mutant = drafter.replace(propose=propose)
    assert chi_square(sampled_triples(mutant, TARGET_ROWS), joint_distribution(TARGET_ROWS, 0, 3)) < 1e-6


@pytest.mark.parametrize(
    ("temperature", "own_token"), [exhaustive(0.0, True), (0.9, True), (0.0, False), exhaustive(0.9, False)]
)
def test_greedy_and_coupled_text_is_the_targets(temperature, own_token):
    draft = two_model(tiny_llama(seed=2, layers=1), tree=trees.branching((2, 1)))
    run = lambda drafter: decode(
        tiny_llama(),
        drafter,
        PROMPTS,
        key=jax.random.key(0),
        max_new_tokens=20,
        temperature=temperature,
        sampling="coupled",
    ).to_lists()
    drafter = hierarchical(tiny_llama(seed=1, layers=1), draft, min_tokens=3, own_token=own_token)
    assert run(drafter) == run(autoregressive())


def of_int8(weights, **changes):
    """SpecMQuant's levels: the int8 form of a model drafts for its int4 form, with a tree of a smaller model below."""
    tree = two_model(tiny_llama(seed=2, layers=1, **changes), tree=trees.branching((2, 1)), lag=4)
    return hierarchical(quantized(weights, "int8"), tree, min_tokens=3)


def test_greedy_text_of_an_int4_target_is_that_of_its_plain_decoding():
    weights = tiny_llama(layers=1)
    target = quantized(weights, "int4-weights")
    run = lambda target, drafter: decode(target, drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=20)
    result, plain = run(target, of_int8(weights)), run(target, autoregressive()).to_lists()
    assert result.to_lists() == plain != run(weights, autoregressive()).to_lists()
    assert max(result.stats.target_passes) < 20


def test_sampled_text_of_an_int4_target_has_its_law():
    """Enumerate two tokens. A mutant fails: the target verifies with a uniform q instead of the middle model's."""
    weights = tiny_llama(layers=3, vocab=3, stacked=True)
    target, drafter = quantized(weights, "int4-weights"), of_int8(weights, vocab=3)
    options = {"samples_per_prompt": 8192}
    counts, law, result = pairs_after(lambda _: drafter, target=target, **options)
    assert chi_square(counts, law) > 1e-3
    assert 0 < result.stats.target_passes.mean() < 2

    def propose(params, *args):
        tree, state = drafter.propose(params, *args)
        return tree._replace(logits=jnp.zeros_like(tree.logits)), state

    mutant, _, _ = pairs_after(lambda _: drafter.replace(propose=propose), target=target, **options)
    assert chi_square(mutant, law) < 1e-6


def passes_of_equals(inner, min_tokens, own_token, model=None):
    """Return the target passes for 24 tokens with an equal middle model."""
    model = tiny_llama() if model is None else model
    drafter = hierarchical(model, inner, min_tokens=min_tokens, own_token=own_token)
    result = decode(model, drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=24)
    return result.stats.target_passes.tolist()


# Without its own token, the nested drafters below ask the same of their caches.
@pytest.mark.parametrize(("own_token", "min_tokens", "drafts"), [(True, 5, 7), exhaustive(False, 4, 6)])
def test_three_equal_models_are_always_right(own_token, min_tokens, drafts):
    """The caches of both inner models hold what a fresh prefill would, after every full acceptance.

    A chain ends once it has `min_tokens`: 1 own token and two inner rounds of 3, or these two rounds alone. An inner
    drafter that is wrong once ends it one token earlier or later, and a random one at `min_tokens`.
    """
    assert passes_of_equals(two_model(tiny_llama(), 2), min_tokens, own_token) == [-(-24 // (drafts + 1))] * 4
    random = two_model(tiny_llama(seed=9, layers=1), 2)
    assert min(passes_of_equals(random, min_tokens, own_token)) > -(-24 // (drafts + 1))


@pytest.mark.parametrize(("scheme", "lag"), [("int4-weights", 2), exhaustive("int4-weights", 4), exhaustive("int8", 2)])
def test_caches_of_three_equal_quantised_models_lack_no_token(scheme, lag):
    """The drafter's cache lacks up to 4 tokens after full acceptance; its lag covers them, or a pass reads them."""
    model = quantized(tiny_llama(layers=1), scheme)
    assert passes_of_equals(two_model(model, 2, lag=lag), 5, True, model) == [-(-24 // 8)] * 4


def test_hierarchical_within_hierarchical():
    """Stack four equal models: a chain of 2 gets its third token from the outer one."""
    within = hierarchical(tiny_llama(), two_model(tiny_llama(), 1), min_tokens=2, own_token=False)
    assert passes_of_equals(within, 2, own_token=False) == [24 // 4] * 4


def test_a_useless_inner_drafter_leaves_a_chain_of_the_middle_model():
    rows = np.roll(np.eye(3, dtype=np.float32), 1, 1)  # the middle model is sure, the drafter of something else
    useless = branching_drafter((1,)).replace(params=jnp.roll(jnp.asarray(rows), 1, 1) + 1e-9)
    drafter = hierarchical(markov(rows + 1e-9), useless, min_tokens=3)
    result = decode(markov(rows + 1e-9), drafter, [[0, 1]], key=jax.random.key(0), max_new_tokens=12, temperature=1.0)
    assert result.stats.target_passes.tolist() == [3]  # 3 drafts and the bonus token a pass


def test_bad_settings():
    with pytest.raises(UsageError, match="min_tokens"):
        hierarchical(tiny_llama(), prompt_lookup(), min_tokens=0)
    with pytest.raises(UsageError, match="lag"):
        two_model(tiny_llama(), lag=1)


def test_what_the_inner_drafter_reads_and_remembers_is_its_own():
    """Count the passes of the middle model for three models that cycle through nine tokens."""
    passes, target = [], markov(np.eye(9, dtype=np.float32)[(np.arange(9) + 1) % 9] + 1e-6)

    def forward(params, tokens, cache, **options):
        if tokens.shape[1] < CHUNK:
            jax.debug.callback(lambda: passes.append(tokens.shape[1]))
        return target.model.forward(params, tokens, cache, **options)

    middle = Target(target.model._replace(forward=forward), target.params)

    def run(drafter):
        passes.clear()
        result = decode(target, drafter, [[*range(9), 0]], key=jax.random.key(0), max_new_tokens=14)
        jax.effects_barrier()
        return result, len(passes)

    make = lambda **options: hierarchical(middle, token_recycling(9, num_nodes=7, **options), min_tokens=6)
    (cold, first), (_, warm), (_, read) = run(make()), run(run(make())[0].drafter), run(make(read_prompt=True))
    assert warm == read < first
    assert cold.drafter.params[0] is make().params[0]  # the middle model's are not copied


def test_rounds_without_drafts_leave_no_refused_ones_in_its_caches():
    """Compare the draft after three empty steps with that of a drafter that has just read the text."""
    limits = jnp.array([99, 0, 0, 0, 99])
    scripted = Controller(
        init=lambda batch: jnp.zeros((batch,), jnp.int32),
        limit=lambda state: limits[state],
        update=lambda state, info: state + 1,
    )
    inner = two_model(tiny_llama(seed=2, layers=1), 3, lag=4)
    drafter, key = hierarchical(tiny_llama_alike(), inner, min_tokens=4), jax.random.key(0)
    job = prepare(tiny_llama(), drafter, PROMPTS[:2], Settings(controller=scripted), key=key, max_new_tokens=40)
    state, propose = start(job), jax.jit(drafter.propose)

    def drafted(state, draft):
        context = Context(state.tokens, state.length, cache=state.cache, target=tiny_llama())
        tree, _ = propose(drafter.params, state.keys, draft, context, jnp.full((2,), 99))
        return jnp.where(tree.valid, tree.tokens, -1).tolist()

    refused = 0
    for _ in range(4):
        state, info, _ = step(job.parts, state)
        refused += int(jnp.sum(info.drafted - info.accepted))
    context = Context(state.tokens, state.length, target=tiny_llama())
    assert refused > 4
    assert drafted(state, state.draft) == drafted(state, jax.jit(drafter.init)(drafter.params, context))
