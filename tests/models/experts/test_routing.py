"""Routing against the routers of transformers, and the forms that run experts against each other and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.arrays import platforms
from specjax.models.experts import blocks, running
from specjax.models.experts.feed import clamped_product
from specjax.models.experts.routing import ExpertChoice, Routing, choose
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.products import matmul
from specjax.models.storage import SCHEMES
from specjax.numerics.quantized_array import WeightFormat, expand_rows, quantize_rows

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(24, 8)).astype(np.float32)
CORRECTION = RNG.normal(size=8).astype(np.float32)

ROUTINGS = {
    "softmax": Routing(3),
    "normalised": Routing(3, normalized=True),
    "softmax of the chosen": Routing(3, "softmax_of_chosen"),
    "best groups by their maximum": Routing(3, scale=16.0, num_groups=4, num_chosen_groups=2),
    "sigmoid with groups": Routing(3, "sigmoid", True, 1e-20, 2.5, 2, 1, "two_best"),
}


def weights_in_float64(logits, routing, correction):
    """Return the weight float64[E] of each expert for one row, by loops."""
    logits = logits.astype(np.float64)
    scores = np.exp(logits) / np.exp(logits).sum() if routing.scores == "softmax" else logits
    scores = 1 / (1 + np.exp(-logits)) if routing.scores == "sigmoid" else scores
    ranked = scores + correction
    groups = np.split(np.arange(len(logits)), routing.num_groups)
    best = 1 if routing.group_score == "maximum" else 2
    by_score = sorted(groups, key=lambda group: -np.sort(ranked[group])[-best:].sum())
    members = np.concatenate(by_score[: routing.num_chosen_groups])
    picks = sorted(members, key=lambda expert: -ranked[expert])[: routing.num_chosen]
    weights = np.zeros(len(logits))
    weights[picks] = scores[picks]
    if routing.scores == "softmax_of_chosen":
        weights[picks] = np.exp(scores[picks]) / np.exp(scores[picks]).sum()
    return weights / (weights.sum() + routing.epsilon if routing.normalized else 1) * routing.scale


@pytest.mark.parametrize("name", ROUTINGS)
def test_weights_equal_those_of_loops(name):
    routing = ROUTINGS[name]
    correction = CORRECTION if routing.scores == "sigmoid" else np.zeros(8, np.float32)
    choice = choose(jnp.asarray(LOGITS), routing, jnp.asarray(correction))
    weights = np.zeros(LOGITS.shape)
    np.put_along_axis(weights, np.asarray(choice.experts), np.asarray(choice.weights), 1)
    expected = [weights_in_float64(row, routing, correction) for row in LOGITS]
    np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=1e-7)
    assert (np.diff(choice.experts) > 0).all()


def test_a_correction_changes_the_choice_and_not_the_weights():
    routing = Routing(2, "sigmoid")
    with_bonus = choose(jnp.asarray(LOGITS), routing, jnp.zeros(8).at[5].set(10.0))
    assert (np.asarray(with_bonus.experts) == 5).any(1).all()
    assert np.asarray(with_bonus.weights).max() < 1.0


def _expert(weights, x):
    hidden = jnp.tanh(jnp.dot(x, weights[0].T, precision="highest"))
    return jnp.dot(hidden, weights[1].T, precision="highest")


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_forms_have_equal_results(rows, monkeypatch):
    """Blocks of 64 rows and fewer: 70 rows need several blocks for one expert."""
    x = RNG.normal(size=(rows, 6)).astype(np.float32)
    weights = tuple(RNG.normal(size=size).astype(np.float32) for size in ((8, 5, 6), (8, 6, 5)))
    logits = RNG.normal(size=(rows, 8)).astype(np.float32)
    logits[:, 3] += 9.0  # an expert that every row chooses
    choice = choose(jnp.asarray(logits), Routing(2))
    expected = np.zeros(x.shape)
    for row, (experts, shares) in enumerate(zip(*map(np.asarray, choice), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            hidden = np.tanh(weights[0][expert].astype(np.float64) @ x[row])
            expected[row] += share * (weights[1][expert] @ hidden)
    run = jax.jit(running.run_experts, static_argnames=("num_experts", "expert", "form"))
    for form in ("loop", "blocks", "gather", "pairs", "dense"):
        y = run(x, choice, weights, num_experts=8, expert=_expert, form=form)
        np.testing.assert_allclose(y, expected, atol=1e-5, err_msg=form)
    monkeypatch.setattr(running, "MAX_DENSE_BYTES", 32 * 4 * 8 * 6)
    y = running.run_experts(jnp.asarray(x), choice, jax.tree.map(jnp.asarray, weights), 8, _expert, "dense")
    np.testing.assert_allclose(y, expected, atol=1e-5, err_msg="blocks of all experts")
    monkeypatch.setattr(platforms, "of_program", lambda: "gpu")
    monkeypatch.setattr(blocks, "BLOCK_ROWS_GPU", 16)
    y = running.run_experts(jnp.asarray(x), choice, jax.tree.map(jnp.asarray, weights), 8, _expert, "blocks")
    np.testing.assert_allclose(y, expected, atol=1e-5, err_msg="a constant number of blocks")


def test_an_overflow_of_another_row_changes_nothing():
    """A row that has not chosen an expert may overflow in it."""
    weights = (np.ones((2, 3, 3), np.float32),)
    expert = lambda weights, x: jnp.dot(x, weights[0].T) * jnp.float32(1e38)
    x = np.array([[1.0, 0, 0], [1e30, 0, 0]], np.float32)
    choice = choose(jnp.array([[1.0, 0], [0, 1.0]]), Routing(1))
    for form in ("loop", "blocks", "pairs", "dense"):
        y = running.run_experts(jnp.asarray(x), choice, weights, 2, expert, form)
        assert np.isfinite(np.asarray(y)[0]).all() and not np.isfinite(np.asarray(y)[1]).any()


FORMS = "loop", "blocks", "gather"
_run = jax.jit(running.run_experts, static_argnames=("num_experts", "expert", "form"))


def _inputs(rows):
    """Return rows, their choice of two of eight experts, and the weights of the experts."""
    x = jnp.asarray(RNG.normal(size=(rows, 6)), jnp.float32)
    weights = tuple(jnp.asarray(RNG.normal(size=size), jnp.float32) for size in ((8, 5, 6), (8, 6, 5)))
    return x, choose(jnp.asarray(RNG.normal(size=(rows, 8)), jnp.float32), Routing(2)), weights


@pytest.mark.parametrize(("form", "rows"), [("loop", 5), ("blocks", 70), ("gather", 5)])
def test_other_rows_change_no_bit_of_a_row(form, rows):
    """The other rows get other values and experts, and the row gets another place among them."""
    x, choice, weights = _inputs(rows)
    new_x, new_choice, _ = _inputs(rows)
    replace = lambda old, new: jnp.concatenate([old[:1], new[1:]])
    second_x, second_choice = replace(x, new_x), jax.tree.map(replace, choice, new_choice)
    last_first = jax.tree.map(lambda leaf: leaf[::-1], (second_x, second_choice))
    row = np.asarray(_run(x, choice, weights, 8, _expert, form=form))[0]
    np.testing.assert_array_equal(row, _run(second_x, second_choice, weights, 8, _expert, form=form)[0])
    np.testing.assert_array_equal(row, _run(*last_first, weights, 8, _expert, form=form)[-1])


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_that_a_row_names_twice_has_both_weights(form):
    x, _, weights = _inputs(5)
    once = ExpertChoice(jnp.full((5, 1), 3), jnp.full((5, 1), 0.75))
    twice = ExpertChoice(jnp.full((5, 2), 3), jnp.tile(jnp.array([0.5, 0.25]), (5, 1)))
    y, expected = (_run(x, choice, weights, 8, _expert, form=form) for choice in (twice, once))
    np.testing.assert_allclose(y, expected, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form):
    x, choice, weights = _inputs(0)
    run = lambda x, weights: jnp.sum(running.run_experts(x, choice, weights, 8, _expert, form))
    assert running.run_experts(x, choice, weights, 8, _expert, form).shape == (0, 6)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.grad(run, (0, 1))(x, weights)))


def test_64_bit_types_change_nothing():
    x, choice, weights = _inputs(5)
    expected = _run(x, choice, weights, 8, _expert, form="loop")
    with jax.enable_x64(True):
        y = running.run_experts(x, choice, weights, 8, _expert, "loop")
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_the_activation_of_gpt_oss():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(hidden_size=4, intermediate_size=6, num_local_experts=1)
    gate, up = RNG.normal(size=(2, 3, 6)).astype(np.float32) * 8
    columns = torch.tensor(np.stack([gate, up], -1).reshape(3, 12))
    expected = GptOssExperts(config)._apply_gate(columns).numpy()
    np.testing.assert_allclose(clamped_product(jnp.asarray(gate), jnp.asarray(up), 7.0), expected, rtol=1e-5, atol=1e-5)


def test_expected_experts():
    sizes = MixtureSizes(128, 768, Routing(8))
    assert [round(sizes.expected_experts(rows), 1) for rows in (1, 2, 8, 32)] == [8.0, 15.5, 51.6, 111.8]


def _bfloat16(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.bfloat16)


def _projected(weights, x):
    (up, bias), down = weights
    return matmul(jnp.tanh(matmul(x, up) + bias), down, jnp.float32)


@pytest.mark.parametrize("rows", [1, 70])
def test_grouped_products_equal_a_loop(rows):
    """Experts of a later layer, with pairs whose expert does not exist, and groups that are larger than a tile."""
    weights = (_bfloat16(16, 24, 16), _bfloat16(16, 24)), _bfloat16(16, 16, 24)
    experts = jnp.asarray([[1, 3], [3, 8], [0, 3]])[jnp.arange(rows) % 3]
    choice = ExpertChoice(experts, jnp.where(experts < 8, jnp.asarray(RNG.uniform(size=(rows, 2)), jnp.float32), 0.0))
    x = _bfloat16(rows, 16)
    run = jax.jit(running.run_experts, static_argnames=("num_experts", "expert", "form"))
    grouped, loop = (
        run(x, choice, weights, 8, _projected, form=form, first=jnp.int32(8)) for form in ("grouped", "loop")
    )
    np.testing.assert_allclose(grouped, loop, atol=0.02 * float(jnp.abs(loop).max()))
    other = run(x.at[1:].set(7.0), choice, weights, 8, _projected, form="grouped", first=jnp.int32(8))
    np.testing.assert_array_equal(grouped[0], other[0])


def test_forms_of_platforms():
    many, sizes = 4096, (8, 128)
    assert {running.form_for(rows, sizes, "cpu") for rows in (1, 16, 64, many)} == {"loop", "blocks"}
    assert running.form_for(many, sizes, "tpu") == "blocks" and running.form_for(8, sizes, "tpu") == "loop"
    assert running.form_for(1, sizes, "tpu") == "gather" and running.form_for(1, sizes, "tpu", is_part=True) == "loop"
    assert running.form_for(many, sizes, "tpu", is_plain=False) == "blocks"
    assert [running.form_for(rows, sizes, "gpu") for rows in (1, 16, 17, many)] == ["pairs", "pairs", "dense", "dense"]
    assert running.form_for(17, sizes, "gpu", is_whole=False) == "blocks"
    grouped = [running.form_for(rows, sizes, "gpu", has_groups=True) for rows in (17, 64, 65)]
    assert grouped == ["pairs", "pairs", "dense"], "experts with groups are expanded before a product of all"


FORMATS = {
    "int8 with rounded rows": SCHEMES["int8"],
    "int8": SCHEMES["int8-weights"],
    "MXFP4": WeightFormat(5, "int8", 32),
    "float8": SCHEMES["fp8"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_forms_of_quantised_experts(name, monkeypatch):
    """All forms equal a loop over the expanded weights. A program for a GPU has the forms of its schedule."""
    shapes = (8, 64, 32), (8, 32, 64)
    stored = [quantize_rows(jnp.asarray(RNG.normal(size=shape), jnp.float32), FORMATS[name]) for shape in shapes]
    x, choice, _ = _inputs(6)
    x = jnp.asarray(RNG.normal(size=(6, 32)), jnp.float32)
    expert = lambda weights, x: matmul(jnp.tanh(matmul(x, weights[0]) / 8), weights[1], jnp.float32)
    run = lambda weights, form: np.asarray(running.run_experts(x, choice, weights, 8, expert, form))
    expected = run([expand_rows(matrix) for matrix in stored], "loop")
    atol = (0.03 if name == "int8 with rounded rows" else 1e-5) * np.abs(expected).max()
    for form in ("loop", "blocks", "gather", "pairs", "dense"):
        np.testing.assert_allclose(run(stored, form), expected, atol=atol, err_msg=form)
        np.testing.assert_allclose(run(stored, form), run(stored, "loop"), atol=1e-5 * np.abs(expected).max())
    form_names = []
    monkeypatch.setattr(platforms, "of_program", lambda: "gpu")
    for form in ("pairs", "dense"):
        monkeypatch.setattr(running, f"_{form}", lambda *_, form=form, **options: form_names.append(form) or x)
    run(stored, None)
    assert form_names == (["pairs"] if name == "MXFP4" else ["dense"]), "12 pairs of 8 experts"


def test_no_ragged_product_on_cpu():
    """XLA on CPU computes every expert in `ragged_dot`."""
    weights = (_bfloat16(8, 24, 16), _bfloat16(8, 24)), _bfloat16(8, 16, 24)
    choice = choose(jnp.asarray(RNG.normal(size=(600, 8)), jnp.float32), Routing(2))
    program = str(jax.make_jaxpr(lambda x: running.run_experts(x, choice, weights, 8, _projected))(_bfloat16(600, 16)))
    assert "ragged_dot" not in program and "pallas_call" not in program and "while" in program
