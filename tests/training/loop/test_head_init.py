"""A head that begins with its target is of the shapes that its kind says, whatever of the target fits; so is one that
begins with another head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from tiers import those

from specjax.errors import UsageError
from specjax.models.heads.kinds import KINDS, TRAINABLE, init_head
from specjax.models.variants.expanding import expand_target
from specjax.training.loop.head_init import matching_share, new_head


@pytest.mark.parametrize("kind", TRAINABLE)
def test_every_kind_begins_with_a_target_of_few_layers(kind):
    target = toy.tiny_llama(layers=3)
    config = KINDS[kind].of_target(target.model.config)
    initial, drawn = (
        new_head(kind, config, target, jax.random.key(0), random=random).params for random in (False, True)
    )
    assert jax.tree.map(jnp.shape, initial) == jax.tree.map(jnp.shape, drawn)


@pytest.mark.parametrize("kind", those({"eagle3", "dflash", "medusa"}, TRAINABLE))
def test_a_head_copies_the_expanded_matrices_of_a_quantised_target(kind):
    target = toy.quantized(toy.tiny_llama(layers=3), "int4-weights", group=16)
    config = KINDS[kind].of_target(target.model.config)
    copied, expected = (
        new_head(kind, config, source, jax.random.key(0)).params for source in (target, expand_target(target))
    )
    jax.tree.map(np.testing.assert_array_equal, copied, expected)


def of_head(kind, *, seed=1, **changes):
    """A head of random parameters with this vocabulary of its own."""
    target = toy.tiny_llama(layers=3)
    config = KINDS[kind].of_target(target.model.config, **changes)
    return target, config, init_head(kind, config, jax.random.key(seed)).params


def test_a_head_of_one_pass_begins_with_one_of_several():
    """EAGLE-3's parameters are P-EAGLE's but for the state of tokens that are not there yet."""
    target, config, drawn = of_head("p_eagle", num_layers=1, embeds=False, draft_vocab_size=8)
    _, _, other = of_head("eagle3", seed=2, draft_vocab_size=8)
    other |= {"vocabulary": jax.tree.map(lambda x: x + 1, other["vocabulary"])}
    initial = new_head("p_eagle", config, target, jax.random.key(1), ids=np.arange(8), other=other).params
    assert initial.keys() - other.keys() == {"mask_hidden"}
    np.testing.assert_array_equal(initial["mask_hidden"], drawn["mask_hidden"])
    for name, part in other.items():
        jax.tree.map(np.testing.assert_array_equal, initial[name], part)


def test_what_another_head_drafts_goes_with_its_output():
    target, config, _ = of_head("eagle3", draft_vocab_size=8)
    ids = np.arange(4, 12)
    begin = lambda **options: new_head("eagle3", config, target, jax.random.key(1), ids=ids, **options).params
    _, _, other = of_head("eagle3", seed=2, draft_vocab_size=6)  # another output, so another vocabulary
    initial, mine = begin(other=other), begin()
    for name in ("head", "vocabulary"):
        jax.tree.map(np.testing.assert_array_equal, initial[name], mine[name])
    jax.tree.map(np.testing.assert_array_equal, initial["first"], other["first"])
    apart = sum(x.size for name in ("head", "vocabulary") for x in jax.tree.leaves(mine[name]))
    total = sum(x.size for x in jax.tree.leaves(mine))
    assert matching_share(mine, other) == (total - apart) / total, "what is said is what is done"


@pytest.mark.parametrize("ids", [None, np.arange(4, 12)])
def test_a_head_of_low_rank_begins_nearest_to_the_targets_output(ids):
    target, config, _ = of_head("eagle3", head_rank=5, draft_vocab_size=64 if ids is None else len(ids))
    initial = new_head("eagle3", config, target, jax.random.key(1), ids=ids).params
    table = target.params.get("head", target.params["embed"])["weight"]
    rows = table if ids is None else table[ids]
    product = initial["head"]["weight"] @ initial["head_down"]["weight"]
    u, s, v = np.linalg.svd(rows, full_matrices=False)
    np.testing.assert_allclose(product, (u[:, :5] * s[:5]) @ v[:5], atol=1e-5)
    with pytest.raises(UsageError, match="head_rank must be below the width of the target"):
        of_head("eagle3", head_rank=target.model.config.width)


def test_a_head_of_which_nothing_fits_is_refused():
    target, config, _ = of_head("eagle3")
    _, _, other = of_head("dflash")
    other = {"norm": other["norm"]}  # which has one width in all
    with pytest.raises(UsageError, match="the head to start from has no matrix with a name and shape of the new head"):
        new_head("eagle3", config, target, jax.random.key(1), other=other)


def rows_of(target, ids=None):
    table = target.params.get("head", target.params["embed"])["weight"]
    return table if ids is None else table[ids]


@pytest.mark.parametrize(("kind", "size"), [("medusa", 0), ("medusa", 8), ("hydra", 0), ("chimera", 0)])
def test_outputs_for_each_depth_begin_as_the_targets_too(kind, size):
    """Each depth's output begins as the target's, as the authors of Medusa, Hydra and Chimera have it."""
    target = toy.tiny_llama(layers=3)
    config = KINDS[kind].of_target(target.model.config, **({"draft_vocab_size": size} if size else {}))
    ids = np.arange(4, 4 + size) if size else None
    params, rows = new_head(kind, config, target, jax.random.key(0), ids=ids).params, rows_of(target, ids)
    if kind == "chimera":
        outputs, rows = params["heads"], jnp.concatenate([rows, rows], 1)
    else:
        outputs = {i: branch["head"] for i, branch in params["branches"].items()}
    assert len(outputs) > 1
    for output in outputs.values():
        np.testing.assert_array_equal(output["weight"], rows)


def test_the_prefix_layer_of_hydra_begins_as_the_targets_last():
    target = toy.tiny_llama(layers=3)
    config = KINDS["hydra"].of_target(target.model.config)
    prefix, random = (
        new_head("hydra", config, target, jax.random.key(0), random=random).params["prefix"] for random in (False, True)
    )
    last = target.params["layers"][2]
    jax.tree.map(np.testing.assert_array_equal, prefix["attention"], last["attention"])
    assert not np.array_equal(prefix["attention"]["o"]["weight"], random["attention"]["o"]["weight"])


def test_clovers_table_is_the_targets_output_and_its_last_norm_the_targets():
    target = toy.tiny_llama(layers=3)
    target = dataclasses.replace(target, params=target.params | {"norm": {"weight": jnp.full(32, 2.0)}})
    params = new_head("clover", KINDS["clover"].of_target(target.model.config), target, jax.random.key(0)).params
    np.testing.assert_array_equal(params["embed"]["weight"], rows_of(target))
    np.testing.assert_array_equal(params["head_norm"]["weight"], target.params["norm"]["weight"])
    assert not np.array_equal(params["embed"]["weight"], target.params["embed"]["weight"])


def test_an_output_of_low_rank_is_taken_as_a_whole_or_not_at_all():
    """Half of another head's and half of the target's would say nothing."""
    target, config, _ = of_head("eagle3", head_rank=8, draft_vocab_size=16)
    _, _, other = of_head("eagle3", seed=2, head_rank=8, draft_vocab_size=12)
    begin = lambda **options: new_head("eagle3", config, target, jax.random.key(1), ids=np.arange(16), **options).params
    initial, mine = begin(other=other), begin()
    for name in ("head", "head_down", "vocabulary"):
        jax.tree.map(np.testing.assert_array_equal, initial[name], mine[name])


def test_a_vocabulary_of_its_own_is_the_lowest_ids_or_those_given():
    target, config, _ = of_head("eagle3", draft_vocab_size=8)
    initial = new_head("eagle3", config, target, jax.random.key(1)).params
    np.testing.assert_array_equal(initial["head"]["weight"], rows_of(target, np.arange(8)))
    count = target.model.vocab_size
    for ids, words in (
        (np.arange(6), r"ids must be 8 integers.*, not int64\[6\]"), (np.arange(8.0), r"integers.*, not float64\[8\]"),
        (np.arange(8)[::-1], "ascending order"), (np.arange(8) + count - 7, f"each from 0 to {count - 1}"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            new_head("eagle3", config, target, jax.random.key(1), ids=ids)


def test_layers_that_the_target_has_not_are_refused():
    few = toy.tiny_llama(layers=3).model.config
    for kind, name in (("kangaroo", "exit_layer"), ("hidden_transfer", "behind")):
        with pytest.raises(UsageError, match=f"{name} must be from . to 3, the target's layers, not 4"):
            KINDS[kind].of_target(few, **{name: 4})
