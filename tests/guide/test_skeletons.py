"""The developer guide: its skeletons run as they stand there and keep what they promise; its walk leads somewhere."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_distribution, without_replacement
from toy import DRAFT_ROWS, TARGET_ROWS, chi_square, joint_distribution, markov, sampled_triples, template, tiny_llama

from specjax import Target, UsageError, decode
from specjax.drafters import two_model
from specjax.drafters.heads.head_drafter import tree_drafter
from specjax.engine.prepare import Settings
from specjax.models.heads.blocks import init_params
from specjax.models.heads.contract import DraftHead
from specjax.trees import make_builder, operations
from specjax.types import Context, Output
from specjax.verifiers.verifier import distribution

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL))
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(14)), [7, 7, 7]]
VOCAB, WIDTH, NEW = 16, 8, 24
SETTINGS = {
    "greedy": {"eos": 4},
    "sampled": {"eos": 4, "temperature": 0.8, "top_k": 12},
    "coupled": {"eos": 4, "temperature": 0.8, "top_k": 12, "sampling": "coupled"},
}


@functools.cache
def skeleton(section):
    """Return what the file of a section defines."""
    (source,) = re.findall(r"^```python\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)
    names = {"__name__": section}
    exec(compile(source, f"CONTRIBUTING.md, {section}", "exec"), names)
    return names


def recurrent(noise=0.0):
    """The model of the guide with random parameters, of which 78 makes greedy texts that wander long; and noise."""
    values = jax.random.normal(jax.random.key(78), (2, VOCAB, WIDTH))
    values += noise * jax.random.normal(jax.random.key(0), values.shape)
    params = {"decay": jnp.float32(0.8), "embedding": values[0], "head": values[1].T}
    return Target(skeleton("A model")["linear_recurrence"](VOCAB, WIDTH), params)


DRAFTERS = {
    "plain": lambda: "autoregressive",
    "bigrams": lambda: skeleton("A drafter")["bigrams"](VOCAB, num_tokens=3),
    "comb below the recurrence": lambda: two_model(recurrent(noise=0.3), tree=skeleton("A tree")["comb"](2, 3)),
}


@functools.cache
def run(drafter, how, rows=(0, 1, 2, 3)):
    """A ragged batch of the recurrence, in which some rows end with an eos."""
    prompts, keys = [PROMPTS[row] for row in rows], jax.random.split(jax.random.key(1), len(PROMPTS))
    key = keys[jnp.array(rows)]
    return decode(recurrent(), DRAFTERS[drafter](), prompts, key=key, max_new_tokens=NEW, **SETTINGS[how])


def test_every_skeleton_is_a_file_and_is_tested_here():
    assert [name for name, text in SECTIONS.items() if "```python" in text] == [
        "A drafter", "A head", "A rule", "A tree", "A model", "A loop",
    ]  # fmt: skip
    assert all(skeleton(name)["__doc__"] for name, text in SECTIONS.items() if "```python" in text)


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "plain"])
def test_greedy_text_is_that_of_plain_decoding(drafter):
    ours, plain = run(drafter, "greedy"), run("plain", "greedy")
    assert ours.to_lists() == plain.to_lists()
    assert set(plain.finish_reasons) == {"eos", "length"}
    assert (np.asarray(ours.stats.target_passes) <= np.asarray(plain.stats.target_passes)).all()
    assert int(ours.stats.accepted.sum()) > 8  # drafts that are never right would prove little
    assert (np.asarray(ours.stats.drafted) > 0).all()  # below a prompt of one token too: it learnt from the text


@pytest.mark.parametrize(
    ("drafter", "how"),
    [("bigrams", "sampled"), ("bigrams", "coupled"), ("comb below the recurrence", "coupled")],
)
def test_sampled_text_is_that_of_plain_sampling(drafter, how):
    ours, plain = run(drafter, how), run("plain", "sampled")
    assert ours.to_lists() == plain.to_lists()
    assert int(ours.stats.accepted.sum()) > 0


def test_an_empty_draft_of_the_drafter_costs_a_plain_step():
    assert 1 in DRAFTERS["bigrams"]().traits.widths


def test_a_round_of_the_drafter_by_hand():
    drafter = skeleton("A drafter")["bigrams"](4, num_tokens=3)
    text = Context(jnp.array([[0, 1, 2, 0]]), jnp.array([3]))
    table = drafter.init((), text)
    assert table.tolist() == [[1, 2, -1, -1]]
    text = text._replace(length=jnp.array([4]))  # ends with 0
    tree, table = drafter.propose((), None, table, text, jnp.array([3]))
    assert tree.tokens[0, :3].tolist() == [0, 1, 2]
    assert tree.valid.tolist() == [[True, True, True, False]]  # nothing is known behind 2
    best = jax.nn.one_hot(jnp.array([[3, 2, 0]]), 4)  # the target would have 3 behind 0, 2 behind 1, 0 behind 2
    for width, row in ((1, [3, 2, -1, -1]), (3, [3, 2, 0, -1])):
        output = Output(best[:, :width], best[:, :width])
        observation = drafter.observe((), table, text, operations.cut(tree, width), None, output)
        assert {x.shape for x in observation} == {(1, drafter.num_nodes)}
        assert drafter.update((), table, observation, None).tolist() == [row]


def drafter_of_head(target):
    kind = skeleton("A head")["KIND"]
    config = kind.of_target(target.model.config)
    head = DraftHead(kind.head(config), init_params(kind.module, config, jax.random.key(3)))
    return tree_drafter(head, make_builder(3, None, None, False))


@pytest.mark.parametrize("how", ["greedy", "coupled"])
def test_the_head_drafts_and_the_text_is_that_of_plain_decoding(how):
    target = tiny_llama(layers=1)
    run = lambda drafter: decode(target, drafter, PROMPTS, key=5, max_new_tokens=NEW, **SETTINGS[how])
    ours, plain = run(drafter_of_head(target)), run("autoregressive")
    assert ours.to_lists() == plain.to_lists()
    assert int(ours.stats.accepted.sum()) > 0


def error_of(core):
    """Return the largest error of the joint distribution of three tokens, over every chain of two drafts and every
    outcome of the rule."""
    joint, _ = block_distribution(core, *without_replacement(DRAFT_ROWS, 0, template((1, 1))), TARGET_ROWS, 2)
    return np.abs(joint - joint_distribution(TARGET_ROWS, 0, 3)).max()


def test_the_rule_gives_the_targets_distribution_and_its_mutants_do_not():
    core = skeleton("A rule")["core"]

    def draws_on_from_p(u, tree, logits):
        end = core(u, tree, logits)
        return end._replace(residual=distribution(logits, end.node))

    believes_in_another_q = lambda u, tree, logits: core(u, tree._replace(logits=tree.logits / 2), logits)
    assert error_of(core) < 1e-6
    assert error_of(draws_on_from_p) > 0.03
    assert error_of(believes_in_another_q) > 0.006


def test_the_tree_under_the_rule_and_alone_gives_the_targets_distribution():
    comb, rule = skeleton("A tree")["comb"], skeleton("A rule")["ratio"]
    wanted = joint_distribution(TARGET_ROWS, 0, 3)
    for teeth, verifier in ((2, None), (1, rule)):
        drafter = two_model(markov(DRAFT_ROWS), tree=comb(teeth, 2))
        assert chi_square(sampled_triples(drafter, TARGET_ROWS, verifier=verifier), wanted) > 1e-3
    with pytest.raises(UsageError, match="ratio is not valid for drafts drawn without_replacement"):
        Settings(temperature=1.0, verifier=rule).select_verifier(two_model(markov(DRAFT_ROWS), tree=comb(2, 2)))


def test_the_model_scores_a_tree_as_it_scores_each_path():
    target, tokens = recurrent(), jnp.array([[3, 5, 6, 7]])
    model, params = target.model, target.params
    mask = jnp.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], bool)  # 3 with children 5, 6; 6 with 7
    start = jax.random.normal(jax.random.key(2), (1, WIDTH))
    output, pending = model.forward(params, tokens, start, positions=jnp.zeros((1, 4), int), mask=mask)
    for path in ([0, 1], [0, 2, 3]):
        state = start
        for node in path:
            one = {"positions": jnp.zeros((1, 1), int), "mask": jnp.ones((1, 1, 1), bool)}
            alone, new = model.forward(params, tokens[:, node : node + 1], state, **one)
            np.testing.assert_allclose(alone.logits[:, 0], output.logits[:, node], rtol=2e-5, atol=2e-5)
            state = model.commit(state, new, jnp.array([[0]]), jnp.array([1]))
        committed = model.commit(start, pending, jnp.array([path]), jnp.array([len(path)]))
        np.testing.assert_allclose(committed, state, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(model.commit(start, pending, jnp.array([[0]]), jnp.array([0])), start)


def test_a_draft_that_is_the_target_is_always_right():
    """The model remembers what a fresh prefill would leave: with one wrong state drafts go astray."""
    drafter = two_model(recurrent(), tree=skeleton("A tree")["comb"](1, 3))
    result = decode(recurrent(), drafter, PROMPTS, key=jax.random.key(1), max_new_tokens=NEW)
    assert result.stats.target_passes.tolist() == [NEW // 4] * len(PROMPTS)


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_the_loop_writes_the_text_of_plain_decoding(how):
    plain = run("plain", how)
    keys = jax.random.split(jax.random.key(1), len(PROMPTS))
    ours = skeleton("A loop")["plain"](recurrent(), PROMPTS, key=keys, max_new_tokens=NEW, **SETTINGS[how])
    assert type(ours) is type(plain)
    assert ours.to_lists() == plain.to_lists()
    assert ours.finish_reasons == plain.finish_reasons
    assert ours.stats.target_passes.tolist() == plain.stats.target_passes.tolist()


def test_the_guide_names_files_and_functions_that_exist():
    named = re.findall(r"`((?:specjax|models|tests|docs)/[\w/.]+)(?::(\w+))?`", GUIDE)
    assert len(named) > 25
    for path, function in named:
        assert (ROOT / path).exists(), path
        if function:
            assert re.search(rf"^(def|class) {function}\b", (ROOT / path).read_text(), re.MULTILINE), (path, function)
