"""A step of an optimizer is the same whether layers are apart or one array each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.errors import UsageError
from specjax.models import LlamaConfig
from specjax.models.heads.kinds import KINDS, TRAINABLE, abstract_head
from specjax.training.loop.optimizers import is_table, make_learning_rate, make_optimizer
from specjax.training.objectives.recipes import recipe_of

LAYERS = 2


def draw(seed: int) -> dict:
    """Layers apart, with weights of such sizes that what is orthogonalised as one matrix shows."""
    rng = np.random.default_rng(seed)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    layer = lambda: {"mlp": {"up": {"weight": array(6, 4)}}, "mlp_norm": {"weight": array(4)}}
    return {"embed": {"weight": array(8, 4)}, "layers": {i: layer() for i in range(LAYERS)}}


def stacked(params: dict) -> dict:
    layers = params["layers"]
    return params | {"layers": jax.tree.map(lambda *xs: jnp.stack(xs), *(layers[i] for i in range(LAYERS)))}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_of_stacked_layers_each_is_on_its_own(name):
    optimizer = make_optimizer(recipe_of("distillspec", optimizer=name, learning_rate=0.1, weight_decay=0.5), 10)

    @jax.jit
    def change(params, gradient):
        state = optimizer.init(params)
        for _ in range(2):  # the first step is that of a warm-up from its start
            updates, state = optimizer.update(gradient, state, params)
        return updates

    apart = change(draw(0), draw(1))
    stacked_change = change(stacked(draw(0)), stacked(draw(1)))
    for a, b in zip(jax.tree.leaves(stacked(apart)), jax.tree.leaves(stacked_change), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_another_optimizer_has_its_own_learning_rate():
    assert recipe_of("medusa", optimizer="muon").learning_rate == 10 * recipe_of("medusa").learning_rate
    assert recipe_of("eagle3", optimizer="adamw").learning_rate == pytest.approx(recipe_of("eagle3").learning_rate / 10)
    assert recipe_of("medusa", optimizer="muon", learning_rate=3e-4).learning_rate == 3e-4
    assert recipe_of("medusa", optimizer="adamw") == recipe_of("medusa")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": ()}, "losses with weights above 0"), ({"losses": (("ce", -1.0),)}, "losses with weights above 0"),
        ({"decay": float("nan")}, "decay must be from 0 to 1"), ({"warmup": 2.0}, "warmup must be from 0 to 1"),
        ({"betas": (2, 0.9)}, "beta_1 must be at least 0 and below 1"),
        ({"betas": (0.9, 1.0)}, "beta_2 must be at least 0 and below 1"), ({"clip": -1.0}, "clip must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more"), ({"depths": 0}, "depths must be at least 1"),
    ],
)  # fmt: skip
def test_recipes_that_nobody_can_follow_are_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        recipe_of("eagle3", **changes)


def test_tables_beside_muon_have_a_share_of_its_rate():
    """They get what Adam (Nesterov's) alone would do, of a share of the rate."""
    recipe = recipe_of("distillspec", optimizer="muon", learning_rate=0.1, weight_decay=0.0, clip=1e9)
    rate = make_learning_rate(recipe, 10)
    params, gradient = draw(0), draw(1)

    def second(optimizer):  # the first step is that of a warm-up from its start
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(gradient, state, params)
        return updates["embed"]["weight"]

    alone = optax.nadam(lambda step: recipe.tables * rate(step), *recipe.betas)
    np.testing.assert_allclose(second(make_optimizer(recipe, 10)), second(alone), rtol=1e-4)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_tables_of_every_head_are_known(kind):
    """Tables are the parameters with a row for each token, and no matrix besides."""
    vocab, width = 997, 64
    shape = {"num_layers": 5, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "mlp_width": 172}
    config = KINDS[kind].of_target(LlamaConfig(vocab_size=vocab, width=width, max_positions=512, **shape))
    for path, x in jax.tree_util.tree_leaves_with_path(abstract_head(kind, config).params):
        prompts = "prompts" in jax.tree_util.keystr(path)  # have rows for tokens that no text has
        assert is_table(path) == (vocab in x.shape and jnp.issubdtype(x.dtype, jnp.floating) and x.ndim == 2) or prompts


def test_a_head_that_judges_has_matrices_and_no_tables():
    """A head that judges has no table, although its name is that of a table."""
    path = tuple(map(jax.tree_util.DictKey, ("head", "blocks", "0", "linear", "weight")))
    assert not is_table(path)
