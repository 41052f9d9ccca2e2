"""Rules on logits that are computed when they are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verifiers
from specjax.types import TokenTree
from specjax.verifiers import VERIFIERS
from specjax.verifiers.node_logits import NodeLogits

BATCH, VOCAB = 24, 4
PARENTS = {"chain": [-1, 0, 1, 2, 3], "tree": [-1, 0, 0, 1, 1, 2, 3]}


def draft(shape: str) -> tuple[TokenTree, jax.Array]:
    """A drafted tree with distributions, and the target's logits."""
    parents, rng = np.array(PARENTS[shape], np.int32), np.random.default_rng(2)
    n = len(parents)
    tokens = rng.integers(0, VOCAB, (BATCH, n))
    for node in range(1, n):  # siblings differ
        if (parents[:node] == parents[node]).any():
            tokens[:, node] = (tokens[:, node - 1] + 1) % VOCAB
    logits = lambda: jnp.asarray(rng.normal(size=(BATCH, n, VOCAB)), jnp.float32)
    shape_of = jnp.asarray(np.tile(parents, (BATCH, 1)))
    tree = TokenTree(jnp.asarray(tokens, jnp.int32), shape_of, shape_of > -2, jax.nn.log_softmax(logits()))
    return tree, logits()


def of_row(rows, node):
    """A change by row: the logits twice as sharp."""
    return 2 * rows


@pytest.mark.parametrize("name", [name for name, rule in VERIFIERS.items() if rule.guarantee != "lossy"])
def test_a_rule_decides_alike_on_rows_and_on_an_array(name):
    rule = VERIFIERS[name]
    tree, logits = draft("chain" if rule.draws == ("chain",) else "tree")
    keys = jax.random.split(jax.random.key(0), (BATCH, tree.tokens.shape[1]))
    verdict = jax.jit(rule)(keys, tree, 2 * logits)
    lazy = jax.jit(lambda keys, tree, logits: rule(keys, tree, NodeLogits(logits, of_row)))(keys, tree, logits)
    jax.tree.map(np.testing.assert_array_equal, verdict, lazy)
    assert (verdict.num_nodes > 1).any()


def test_rules_by_row_never_read_all_rows():
    tree, logits = draft("tree")
    keys = jax.random.split(jax.random.key(0), (BATCH, tree.tokens.shape[1]))

    def rows_read(rule) -> set[int]:
        shapes = set()

        def change(rows, node):
            shapes.add(rows.shape[1])
            return rows

        jax.make_jaxpr(lambda logits: rule(keys, tree, NodeLogits(logits, change)))(logits)
        return shapes

    for name in ("greedy", "sample_and_match", "recursive_rejection", "specinfer", "spectr", "greedy_multi_draft"):
        assert rows_read(VERIFIERS[name]) == {1}, name
    for name in ("traversal", "typical"):
        assert rows_read(VERIFIERS[name]) == {tree.tokens.shape[1]}, name


def test_a_change_of_the_wrong_node_is_caught():
    tree, logits = draft("tree")
    keys = jax.random.split(jax.random.key(0), (BATCH, tree.tokens.shape[1]))
    of_root = lambda rows, node: logits if node is None else logits[:, :1]
    wrong = verifiers.sample_and_match(keys, tree, NodeLogits(logits, of_root))
    right = verifiers.sample_and_match(keys, tree, logits)
    assert not np.array_equal(wrong.next_token, right.next_token)
