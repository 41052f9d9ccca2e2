"""The judge: what its head adds to the exact test, on chains and trees."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lossy import (
    GOLDEN,
    judge_core,
    random_chains,
    standard_core,
    with_head,
)

from specjax import UsageError
from specjax.models.loading.decision_heads import save_judge
from specjax.trees import operations
from specjax.types import TokenTree
from specjax.verifiers import recursive_rejection
from specjax.verifiers.lossy.judge import init_judge, judge, judge_score
from specjax.verifiers.parsing import parse_rule
from specjax.verifiers.verifier import distribution

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_judge_mask_is_golden():
    case = GOLDEN["judge"]
    n = len(case["standard_ok"]) + 1
    p, q = np.log([[0.5, 0.5], [0.4, 0.6]]).astype(np.float32)
    tree = operations.chain(jnp.ones((1, n), jnp.int32), jnp.ones((1, n), bool), jnp.tile(q, (1, n, 1)))
    u = jnp.where(jnp.array([1, *case["standard_ok"]]) == 1, 0.1, 0.95)[None]  # accepted below 0.5 / 0.6
    hidden = jnp.where(jnp.array([0, *case["judge_ok"]]) == 1, 2.0, -2.0)[None, :, None]
    core = jax.jit(lambda t: judge_core(u, tree, jnp.tile(p, (1, n, 1)), hidden, jnp.ones(1), jnp.zeros(()), t))
    counts = {}
    for name, threshold in (("accepted_standard", 1.0), ("accepted_combined", 0.5)):
        end = core(jnp.asarray(threshold))
        counts[name] = int(end.num_nodes[0]) - 1
        np.testing.assert_allclose(end.residual[0], [1.0, 0.0], atol=1e-6)  # norm([p - q]+)
    assert counts == {name: case[name] for name in counts}


def test_judge_accepts_more_the_lower_its_threshold_and_all_at_zero():
    u, tree, logits = random_chains()
    core = jax.jit(lambda threshold: with_head([-4.0, -2.0, 0.0, 1.0, 2.0, 4.0], threshold)(u, tree, logits))
    ends = [core(threshold) for threshold in (1.0, 0.95, 0.8, 0.55, 0.3, 0.05, 0.0)]
    lengths = [np.asarray(end.num_nodes) for end in ends]
    for low, high in itertools.pairwise(lengths):
        assert (high >= low).all() and (high > low).any()
    np.testing.assert_array_equal(lengths[0], standard_core(u, tree, logits).num_nodes)
    np.testing.assert_array_equal(lengths[-1], tree.valid.sum(1))
    bonus = distribution(logits, ends[-1].node)  # also after a short draft
    np.testing.assert_allclose(ends[-1].residual, bonus, atol=2e-6)


def test_judge_descends_into_the_first_judged_sibling():
    tree = TokenTree(jnp.array([[0, 1, 2, 0]]), jnp.array([[-1, 0, 0, 2]]), jnp.ones((1, 4), bool))
    logits = jnp.log(jnp.full((1, 4, 3), jnp.array([0.5, 0.3, 0.2])))
    u = jnp.full((1, 4), 0.99)
    core = jax.jit(lambda scores: with_head(scores, 0.5)(u, tree, logits))
    accept = lambda scores: core(jnp.array(scores)).path[0].tolist()
    assert accept([-1, -1, -1]) == [0, -1, -1, -1]
    assert accept([-1, -1, 1]) == [0, 2, -1, -1]
    assert accept([1, -1, 1]) == [0, 2, 3, -1]
    assert accept([1, 1, 1]) == [0, 1, -1, -1]  # shorter than with the head that doubts token 1
    left = core(jnp.array([-1, -1, 1])).residual[0]
    np.testing.assert_allclose(left, [0, 0.6, 0.4], atol=1e-6)  # p without the rejected token 0


def test_judge_reads_the_feature_of_the_node_itself():
    """After it has read x; the feature that predicted x would be that of the parent."""
    u, tree, logits = random_chains(batch=8)
    hidden = jnp.where(jnp.arange(5) == 1, 1.0, -1.0)[None, :, None] * jnp.ones((8, 1, 1))
    reject = jnp.full_like(logits, -jnp.inf).at[:, :, 0].set(0.0)
    never = tree._replace(tokens=jnp.ones_like(tree.tokens), valid=jnp.ones_like(tree.valid))
    end = judge_core(u, never, reject, hidden, jnp.ones(1), jnp.zeros(()), jnp.asarray(0.5))
    assert end.num_nodes.tolist() == [2] * 8


def test_a_new_head_compiles_nothing_and_an_untrained_one_accepts_nothing():
    _, tree, logits = random_chains(batch=8)
    keys = jax.random.split(jax.random.key(0), tree.tokens.shape)
    hidden = jax.random.normal(jax.random.key(1), (*tree.tokens.shape, 3), jnp.bfloat16)
    compiled = []

    @jax.jit
    def verify(rule):
        compiled.append(rule.name)
        return rule(keys, tree, logits, hidden)

    untrained = verify(judge(*init_judge(3)))
    jax.tree.map(np.testing.assert_array_equal, untrained, jax.jit(recursive_rejection)(keys, tree, logits))
    everything = verify(judge(jnp.ones(3), 100.0, 0.2))
    assert compiled == ["judge"]
    np.testing.assert_array_equal(everything.num_nodes, tree.valid.sum(1))
    with pytest.raises(ValueError, match="hidden"):
        judge(*init_judge(3))(keys, tree, logits)


def test_a_judge_by_the_name_of_its_file(tmp_path):
    save_judge(tmp_path / "judge.safetensors", [1.0, -2.0, 0.5], 0.25, threshold=0.75)
    of = lambda spec: [np.asarray(x).tolist() for x in parse_rule(spec).params]
    assert of(f"judge:{tmp_path}/judge.safetensors") == [[1.0, -2.0, 0.5], 0.25, 0.75]
    assert of(f"judge:{tmp_path}/judge.safetensors,0.5")[2] == 0.5
    assert of(f"judge:file={tmp_path}/judge.safetensors,threshold=0.25")[2] == 0.25
    with pytest.raises(UsageError, match=r"threshold must be from 0 to 1, not 1\.5"):
        parse_rule(f"judge:{tmp_path}/judge.safetensors,1.5")
    _, tree, logits = random_chains(batch=8)
    keys, hidden = jax.random.split(jax.random.key(0), tree.tokens.shape), jnp.zeros((*tree.tokens.shape, 4))
    with pytest.raises(UsageError, match="the judge head has width 3, but the target's hidden states have 4"):
        parse_rule(f"judge:{tmp_path}/judge.safetensors")(keys, tree, logits, hidden)


def test_training_the_head_leaves_the_target_alone():
    inputs = jax.random.normal(jax.random.key(0), (4, 3))
    weight, bias = init_judge(2)

    def loss(target, weight, bias):
        return jnp.sum(jax.nn.softplus(judge_score(jnp.tanh(inputs @ target), weight + 1, bias)))

    to_target, to_weight, to_bias = jax.grad(loss, (0, 1, 2))(jnp.ones((3, 2)), weight, bias)
    assert (to_target == 0).all() and (to_weight != 0).all() and to_bias != 0
