"""The conformance suite: properties of every drafter of the catalogue.

Compilation is nearly all of its time, so the tests share shapes and settings: a row costs ten programs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled_programs
from heads import OF_OTHER_TARGETS, tiny_head
from rules import takes_all
from tiers import those
from toy import (
    ADVERSARY,
    DRAFT_ROWS,
    TARGET_ROWS,
    branching_drafter,
    chi_square,
    joint_distribution,
    markov,
    quantized,
    sampled_triples,
    tiny_datastore,
    tiny_llama,
)
from unusual_modes import unusual_modes

from specjax import Target, UsageError, decode, drafters, make_drafter, stream, trees
from specjax.catalog import of_kind
from specjax.engine import run as engine
from specjax.engine.prepare import Settings, prepare
from specjax.numerics.sampling import draw
from specjax.types import Context
from specjax.verifiers import sample_and_match, standard

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7, 7]]
PROMPT_TUPLES = tuple(map(tuple, PROMPTS))  # hashable
OPTIONS = {
    "auto": {"widths": (1, 3, 6), "costs": (1.0, 1.1, 1.2), "num_recycled": 7},
    "choice": {"num_nodes": 4, "depths": (2,)},
    "dynamic_exit": {"num_tokens": 4},
    "early_exit": {"exit_layer": 1, "num_tokens": 3},
    "easyspec": {"num_tokens": 3, "group": 2},
    "aded": {"num_nodes": 7, "depth": 3, "buckets": 8},
    "dflash": {"tree": trees.drawn_ddtree(6)},
    "dspark": {"tree": trees.branching("2x1x1"), "stop": trees.stops.drafter_confidence(0.3)},
    "eagle": {"tree": trees.branching("2x1x1")},
    "eagle3": {"num_tokens": 3},
    "hydra": {"tree": trees.branching("2x1x1")},
    "clover": {"num_tokens": 3},
    "redrafter": {"tree": trees.beam(2, 3)},
    "chimera": {"tree": trees.branching("2x1x1")},
    "falcon": {"tree": trees.branching("2x1x1")},
    "medusa": {"tree": trees.ddtree_auto(), "costs": (1.0, 1.1, 1.2, 1.3)},
    "mtp": {"tree": trees.branching("2x1x1")},
    "longspec": {"tree": trees.branching("2x1x1")},
    "kangaroo": {"num_tokens": 3, "stop": trees.stops.confidence(0.1)},
    "hamburger": {"num_tokens": 3, "stop": trees.stops.drafter_confidence(0.3)},
    "m2r2": {"num_tokens": 3, "stop": trees.stops.drafter_confidence(0.3)},
    "hierarchical": {"min_tokens": 3},
    "input_guided": {"num_tokens": 6},
    "jacobi": {"window": 4},
    "lookahead": {"ngram": 3, "window": 3, "guesses": 2, "buckets": 16},
    "ppd": {"num_nodes": 16, "accuracy": ((0.5, 0.2), (0.4, 0.2), (0.3, 0.1)), "costs": (1.0,) * 16},
    "p_eagle": {"tree": trees.ddtree(6)},
    "prompt_lookup": {"num_tokens": 4},
    "rasd": {"tree": "top:2x1"},
    "suffix": {"num_tokens": 5},
    "rapid": {"num_tokens": 3, "budget": 12, "chunk": 4, "query": 3, "max_new_tokens": 20},
    "rest": {"num_nodes": 7, "depth": 4, "max_span": 4, "num_paths": 8},
    "sparse_cache": {"budget": 12, "window": 4, "refresh": 6, "pays_from": 0},
    "superposed": {"exit_layer": 1, "num_tokens": 3, "drafts": 2},
    "thinned": {"depth": "calm:0.3,every=1", "num_tokens": 3},
    "stree": {"tree": "beam:2x2"},
    "swift": {"num_tokens": 4, "layers": (0, 1), "ratio": 0.5, "window": 4, "stop": 0.1},
    "stand": {"tree": ((0,), (1,), (0, 0)), "buckets": 4, "read_prompt": False},
    "token_recycling": {"num_nodes": 7},
    "triforce": {"min_tokens": 2, "budget": 17, "refresh": 6, "pays_from": 0},
    "two_model": {"num_tokens": 3},
}
# What drafts with a denoiser is tested in tests/diffusion/drafters.
METHODS = {
    name: row
    for name, row in of_kind("drafter").items()
    if "denoiser" not in row.needs and name not in OF_OTHER_TARGETS
}
NAMES = sorted(METHODS)
# What compiles most is done for one row of each kind; for the others in the tier `exhaustive`.
OF_EACH_KIND = {"auto", "jacobi", "prompt_lookup", "rasd", "rest", "swift", "two_model"}
HEADS = {name for name in NAMES if METHODS[name].needs == {"head"}} - {"dspark", "eagle3", "hydra"}
"""Learned heads, but for one of each kind: what they share is one loop. The greedy text is checked of all."""
USUAL = those(set(NAMES) - HEADS, NAMES)
EXACT = [name for name in NAMES if METHODS[name].guarantee == "distribution"]
DRAWS_ITS_POINTS = {"jacobi", "lookahead", "stand"}  # by the row's key, apart from the noise of the target's draws
BATCH_WIDE = {"auto", "choice", "medusa"}  # decide for the whole batch: a row's passes depend on it, its text does not


def make(name, target, draft):
    options = dict(OPTIONS.get(name, {}))
    if "datastore" in METHODS[name].needs:
        options["datastore"] = tiny_datastore(target.model.vocab_size)
    if "fill" in METHODS[name].needs:
        vocab = target.model.vocab_size
        options |= {"fill": masked_places, "params": of_masked_places(vocab), "mask_token": vocab - 1, "num_tokens": 3}
    return make_drafter(name, target, draft, **options)


def masked_places(params, tokens, visible, positions):
    """Return logits of masked positions; params[t, i] are the logits at distance i after the last text token t."""
    last = jnp.max(jnp.where(visible, jnp.arange(tokens.shape[1]), 0), 1)
    token = jnp.take_along_axis(tokens, last[:, None], 1)
    return params[token, jnp.arange(positions.shape[1])]


@functools.cache
def of_masked_places(vocab):
    return jax.random.normal(jax.random.key(5), (vocab, 3, vocab))


@functools.cache
def drafter_of(name):
    return make(name, tiny_llama(), draft_of(name))


def draft_of(name):
    if "head" in METHODS[name].needs:
        return tiny_head(name, tiny_llama())
    return tiny_llama(seed=1, layers=5 if name == "easyspec" else 1)  # middle layers to group


@functools.cache
def run(name, temperature=0.0, new=24, eos=(), prompts=PROMPT_TUPLES, seed=0, sampling="speculative", **options):
    """Decode with a method on the tiny Llama; return lists of new tokens, and the result."""
    result = decode(
        tiny_llama(),
        drafter_of(name),
        prompts,
        key=jax.random.key(seed),
        max_new_tokens=new,
        temperature=temperature,
        eos=eos,
        sampling=sampling,
        **options,
    )
    return result.to_lists(), result


@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_equals_plain_greedy_on_ragged_batches(name):
    ours, result = run(name, eos=(27, 12))
    assert ours == run("autoregressive", eos=(27, 12))[0]
    assert 0 < result.hit_eos.sum() < len(PROMPTS)


@functools.cache
def int8_llama():
    """Return the tiny Llama with int8 weights and activations."""
    return quantized(tiny_llama(), "int8")


@functools.cache
def int8_texts(name):
    drafter = make(name, int8_llama(), draft_of(name))
    return decode(int8_llama(), drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=24).to_lists()


@pytest.mark.parametrize("name", those({"auto", "early_exit", "eagle3"}, NAMES))
def test_greedy_output_of_an_int8_target_is_that_of_its_plain_decoding(name):
    assert int8_texts(name) == int8_texts("autoregressive")
    assert int8_texts(name) != run("autoregressive")[0]


@pytest.mark.parametrize("name", those({"auto", "lookahead"}, NAMES))
def test_no_controller_changes_a_greedy_text(name):
    """Test a controller with limits that jump between steps and rows."""
    ours, _ = run(name, eos=(27, 12), controller=ADVERSARY)
    assert ours == run("autoregressive", eos=(27, 12))[0]


@pytest.mark.parametrize("name", those({"rasd"}, NAMES))
def test_every_draft_is_one_that_its_rule_can_take(name):
    """Check all drafts with `debug`: the order of nodes, the logits of every token, and distinct siblings."""
    ours, result = run(name, 1.0, debug=True)
    assert result.stats.violations.tolist() == [0] * len(PROMPTS)
    assert ours == run(name, 1.0)[0]


@pytest.mark.parametrize("name", those({"auto", "two_model"}, EXACT))
def test_coupled_text_is_that_of_plain_sampling(name):
    ours = run(name, temperature=0.8, sampling="coupled")[0]
    assert ours == run("autoregressive", temperature=0.8)[0]


@pytest.mark.parametrize("name", those(set(EXACT) - HEADS, EXACT))
def test_point_mass_methods_sample_the_text_of_plain_sampling(name):
    if drafter_of(name).traits.draws == "point_mass":
        assert run(name, temperature=1.0)[0] == run("autoregressive", temperature=1.0)[0]
    else:
        assert (
            run(name, temperature=1.0)[0] != run("autoregressive", temperature=1.0)[0]
        )  # other draws, same distribution


@pytest.mark.parametrize("name", USUAL)
def test_a_row_does_not_depend_on_its_neighbours(name):
    """Decode two rows of a batch at other positions among other rows; the program is the same, so this is cheap."""
    batch, result = run(name, temperature=0.7)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(4))
    order = [2, 3, 1, 0]
    neighbours = [PROMPTS[2], [9, 8, 9], PROMPTS[1], [6, 1]]
    moved = decode(
        tiny_llama(), drafter_of(name), neighbours, key=keys[np.array(order)], max_new_tokens=24, temperature=0.7
    )
    for ours, theirs in ((0, 2), (2, 1)):
        assert moved.to_lists()[ours] == batch[theirs]
        if name not in BATCH_WIDE:
            for one, other in zip(*map(jax.tree.leaves, (moved.stats, result.stats)), strict=True):
                np.testing.assert_array_equal(one[ours], other[theirs])


@pytest.mark.parametrize("name", those({"auto", "two_model"}, NAMES))
def test_a_row_alone_equals_the_row_in_a_batch(name):
    temperature = 0.8
    batch, result = run(name, temperature)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(4))
    for b in (1, 2):
        alone = decode(
            tiny_llama(),
            drafter_of(name),
            [PROMPTS[b]],
            key=keys[b : b + 1],
            max_new_tokens=24,
            temperature=temperature,
        )
        assert alone.to_lists()[0] == batch[b]
        if name in BATCH_WIDE:
            continue
        for ours, theirs in zip(*map(jax.tree.leaves, (alone.stats, result.stats)), strict=True):
            np.testing.assert_array_equal(ours[0], theirs[b])


@pytest.mark.parametrize("name", those({"auto", "two_model"}, NAMES))
def test_stream_equals_decode(name):
    rows = [[] for _ in PROMPTS]
    passes = 0
    steps = stream(tiny_llama(), drafter_of(name), PROMPTS, key=jax.random.key(0), max_new_tokens=24, temperature=0.7)
    for step in steps:
        passes += 1
        for row, new, accepted in zip(rows, step.tokens, step.accepted, strict=True):
            assert 0 <= accepted <= len(new)
            row += new
    lists, result = run(name, temperature=0.7)
    assert rows == lists
    assert passes == int(result.stats.target_passes.max())


# In the program of samples, which takes any temperature, where another test needs it too; for others in that of the
# greedy text, which is compiled already: a program more for each took 28 s.
SAMPLED = {"auto", "autoregressive", "eagle3", "prompt_lookup", "token_recycling", "two_model"}


@pytest.mark.parametrize(
    ("name", "temperatures"),
    [
        pytest.param(name, temperatures, id=f"{name}-{temperatures[0]}", marks=[] if quick else pytest.mark.exhaustive)
        for name in NAMES
        for temperatures, quick in (
            ((0.8, 0.5), name in SAMPLED),
            ((0.0, 0.0), name not in SAMPLED | HEADS),
        )
    ],
)
def test_second_call_compiles_nothing(name, temperatures):
    first = make(name, tiny_llama(), draft_of(name))  # now: what another test compiled may have been dropped since
    call = {"max_new_tokens": 24, "eos": () if temperatures[0] else (27, 12)}
    decode(tiny_llama(), first, PROMPTS, key=jax.random.key(0), temperature=temperatures[0], **call)
    rebuilt = make(name, tiny_llama(), draft_of(name))
    key = jax.random.key(1).block_until_ready()
    with compiled_programs() as compiled:
        again = decode(tiny_llama(), rebuilt, PROMPTS, key=key, temperature=temperatures[1], **call)
        jax.block_until_ready(again)
    assert compiled == []


@pytest.mark.parametrize("name", USUAL)
def test_equal_settings_make_one_program(name):
    """The structure of a drafter and the types of its arrays are the key of a compiled program."""
    ours, again = (make(name, tiny_llama(), draft_of(name)) for _ in range(2))
    assert jax.tree.structure(ours) == jax.tree.structure(again)
    assert [jax.typeof(leaf) for leaf in jax.tree.leaves(ours)] == [jax.typeof(leaf) for leaf in jax.tree.leaves(again)]


def test_functions_that_are_made_anew_make_another_program():
    ours, again = (drafter.replace(propose=lambda *arguments: None) for drafter in [drafter_of("prompt_lookup")] * 2)
    assert jax.tree.structure(ours) != jax.tree.structure(again)


def job_of(name):
    settings = Settings(temperature=0.5)
    return prepare(tiny_llama(), drafter_of(name), PROMPTS, settings, key=jax.random.key(1), max_new_tokens=24)


@pytest.mark.parametrize("name", those(OF_EACH_KIND, NAMES))
def test_steps_transfer_nothing(name):
    job = job_of(name)
    state, _, _ = engine.step(job.parts, engine.start(job))
    with jax.transfer_guard("disallow"):
        engine.step(job.parts, state)


@pytest.mark.parametrize("name", those({"auto", "rasd"}, NAMES))
def test_drafting_twice_gives_the_same_tree(name):
    """Draft twice after two steps, and with another key if the method does not sample."""
    job = job_of(name)
    state = engine.start(job)
    for _ in range(2):
        state, _, _ = engine.step(job.parts, state)

    @jax.jit
    def drafts(drafter, state, *keys):
        context = Context(state.tokens, state.length, job.parts.sampling, cache=state.cache, target=job.parts.target)
        limit = jnp.full(len(PROMPTS), drafter.max_depth)
        return [drafter.propose(drafter.params, key, state.draft, context, limit)[0] for key in keys]

    keys, other_keys = (jax.random.split(jax.random.key(seed), len(PROMPTS)) for seed in (2, 3))
    first, second, third = drafts(job.parts.drafter, state, keys, keys, other_keys)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    if job.parts.drafter.traits.draws == "point_mass" and name not in DRAWS_ITS_POINTS:
        jax.tree.map(np.testing.assert_array_equal, first, third)


@pytest.mark.parametrize("name", those({"auto", "two_model"}, NAMES))
def test_works_inside_the_callers_jit(name):
    @jax.jit
    def program(target, drafter, tokens, lengths, key):
        return decode(target, drafter, (tokens, lengths), key=key, max_new_tokens=24, temperature=0.8).tokens

    tokens = np.zeros((len(PROMPTS), 128), np.int32)
    for place, prompt in zip(tokens, PROMPTS, strict=True):
        place[: len(prompt)] = prompt
    ours = program(tiny_llama(), drafter_of(name), tokens, np.array(list(map(len, PROMPTS))), jax.random.key(0))
    np.testing.assert_array_equal(ours, run(name, temperature=0.8)[1].tokens)


def toy_drafter(name):
    head = "head" in METHODS[name].needs
    return make(name, markov(), tiny_head(name, markov()) if head else markov(DRAFT_ROWS))


# The others draft point masses: their text is that of plain sampling, as was shown above.
DRAWN = {"dflash2", "dspark", "dynamic_exit", "eagle3", "early_exit", "easyspec", "hierarchical", "rapid"}


OF_LAYERS = {"longspec", "m2r2", "sparse_cache", "thinned", "triforce"}
"""Methods that need layers. Their laws are tested with a tiny Llama, in the files of the methods."""


@pytest.mark.parametrize("name", those(OF_EACH_KIND | DRAWN | {"autoregressive"}, sorted({*EXACT} - OF_LAYERS)))
def test_sampled_text_has_the_joint_law_of_the_target(name):
    counts = sampled_triples(toy_drafter(name), TARGET_ROWS)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


@pytest.mark.parametrize("branching", [(1, 1), (2, 2), (3, 1)])
def test_trees_drawn_without_replacement_have_the_joint_law_of_the_target(branching):
    drafter = branching_drafter(branching).replace(params=jnp.asarray(DRAFT_ROWS))
    assert chi_square(sampled_triples(drafter, TARGET_ROWS), joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


def bonus_without_residual(keys, tree, logits):
    """Check that a mutant fails: after a rejection it draws from p instead of the residual."""
    verdict = standard(keys, tree, logits)
    row = jnp.arange(keys.shape[0])
    node = verdict.path[row, verdict.num_nodes - 1]
    return verdict._replace(next_token=draw(keys[row, node], logits[row, node]))


def one_key_for_all_positions(keys, tree, logits):
    """Check that a mutant fails: every node of the tree draws with the root's noise."""
    return sample_and_match(jnp.broadcast_to(keys[:, :1], keys.shape), tree, logits)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("two_model", takes_all), ("two_model", bonus_without_residual), ("prompt_lookup", one_key_for_all_positions)],
)
def test_the_chi_square_catches_broken_rules(name, mutant):
    counts = sampled_triples(toy_drafter(name), TARGET_ROWS, verifier=mutant)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) < 1e-6


def test_drafts_that_share_the_noise_of_their_verification_are_caught(monkeypatch):
    """Check that a mutant of the engine fails: drafts share the noise of the target's draws, but p/q verifies them.

    The residual then draws with the same noise again.
    """
    p, q = (np.tile(np.float32(row), (4, 1)) for row in ([0.1, 0.3, 0.3, 0.3], [0.85, 0.13, 0.01, 0.01]))
    drafter = drafters.two_model(markov(q), 3, keep_logits=True)
    p_value = lambda: chi_square(sampled_triples(drafter, p, verifier=standard), joint_distribution(p, 0, 3))
    assert p_value() > 1e-3
    monkeypatch.setattr(Settings, "is_coupled", True)
    assert p_value() < 1e-6


@pytest.mark.parametrize("name", those({"two_model", "auto"}, NAMES))
def test_the_same_text_in_unusual_modes(name):
    """Decode in a process with 64-bit computations, and with strict promotion."""
    with unusual_modes():
        assert jnp.arange(2).dtype == jnp.int64
        for temperature in (0.0, 0.8):
            result = decode(
                tiny_llama(), drafter_of(name), PROMPTS, key=jax.random.key(0), max_new_tokens=24,
                temperature=temperature, eos=(27, 12),
            )  # fmt: skip
            assert {x.dtype.itemsize for x in (result.tokens, result.lengths, *jax.tree.leaves(result.stats))} <= {1, 4}
            assert result.to_lists() == run(name, temperature, eos=(27, 12))[0]


def test_one_key_for_all_rows_is_caught():
    """Detect a key that is replicated over shards, so that rows repeat each other."""
    prompts, key = (tuple(PROMPTS[2]),) * 4, jnp.broadcast_to(jax.random.key(0), (4,))
    same = decode(tiny_llama(), drafter_of("two_model"), prompts, key=key, max_new_tokens=24, temperature=1.0)
    assert len({tuple(row) for row in same.to_lists()}) == 1
    assert len({tuple(row) for row in run("two_model", 1.0, prompts=prompts)[0]}) == 4


@pytest.mark.parametrize("name", those({"auto"}, NAMES))
def test_eight_devices_equal_one(name):
    """Decode rows of different lengths sharded over 8 devices, with replicated parameters."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), "data")
    place = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    prompts = [[i + 1, 2, 3, i + 1, 2, 3, i + 1] for i in range(8)]
    tokens, lengths = jnp.array(prompts), jnp.array([5, 1, 7, 2, 3, 6, 4, 5])  # behind the prompt: padding
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(8))
    target, drafter = tiny_llama(), drafter_of(name)
    options = {"max_new_tokens": 16, "temperature": 0.8, "eos": (3,), "sampling": "coupled"}
    alone = decode(target, drafter, (tokens, lengths), key=keys, **options)
    spread = decode(
        Target(target.model, place(target.params)),
        drafter.replace(params=place(drafter.params)),
        (place(tokens, "data"), place(lengths, "data")),
        key=place(keys, "data"),
        **options,
    )
    np.testing.assert_array_equal(alone.tokens, spread.tokens)
    for ours, theirs in zip(*map(jax.tree.leaves, (alone.stats, spread.stats)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_name_will_do_and_none_is_auto():
    target, call = markov(), {"key": jax.random.key(0), "max_new_tokens": 9}
    wanted = decode(target, "autoregressive", [[0]], **call).to_lists()
    assert decode(target, None, [[0]], **call).to_lists() == wanted
    rows = np.full((7, 7), 1e-6, np.float32)
    rows[np.arange(7), (np.arange(7) + 1) % 7] = 1.0
    drafted = lambda drafter: int(
        decode(markov(rows), drafter, [[*range(7)] * 3], **call | {"max_new_tokens": 60}).stats.drafted[0]
    )
    assert drafted(None) == drafted("auto") > 20 > drafted("autoregressive") == 0
    with pytest.raises(UsageError, match="unknown method"):
        decode(target, "nothing", [[0]], **call)


def test_unknown_and_incomplete_methods():
    with pytest.raises(UsageError, match='unknown method "meduza"; did you mean medusa'):
        make_drafter("meduza", tiny_llama())
    with pytest.raises(UsageError, match='unknown method "oracle"; choose one of auto, choice'):
        make_drafter("oracle", tiny_llama())
    with pytest.raises(UsageError, match="needs a draft model"):
        make_drafter("two_model", tiny_llama())
    with pytest.raises(UsageError, match="medusa needs a draft head of the target; give one with --draft"):
        make_drafter("medusa", tiny_llama())
    with pytest.raises(UsageError, match="draft is a whole model; choose method two_model"):
        make_drafter("medusa", tiny_llama(), tiny_llama(seed=1))
    with pytest.raises(UsageError, match="draft is of kind eagle3; choose method eagle3"):
        make_drafter("medusa", tiny_llama(), tiny_head("eagle3", tiny_llama()))
    with pytest.raises(
        UsageError, match="two_model needs a draft model, and draft is a draft head; choose method eagle"
    ):
        make_drafter("two_model", tiny_llama(), tiny_head("eagle", tiny_llama()))
    with pytest.raises(UsageError, match="needs a datastore"):
        make_drafter("rest", tiny_llama())
    with pytest.raises(UsageError, match="needs a model of masked blocks"):
        make_drafter("nar_block", tiny_llama(), mask_token=0)
    for name, loop in (("pearl", "pearl"), ("superposed_decoding", "superposed")):
        with pytest.raises(UsageError, match=rf"{name} has its own decoding loop .* call specjax\.decoders\.{loop}\("):
            decode(markov(), name, [[0]], key=jax.random.key(0), max_new_tokens=1)
    with pytest.raises(UsageError, match=r"64 tokens .* 3"):
        make_drafter("rest", markov(), datastore=tiny_datastore(64))
