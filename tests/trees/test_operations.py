"""Depths, ancestors, templates and compaction."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.trees import operations
from specjax.trees.templates import Template
from specjax.types import TokenTree

parent_lists = (
    st.integers(1, 9).flatmap(lambda n: st.tuples(*[st.integers(0, i) for i in range(n)])).map(lambda p: (-1, *p))
)


@settings(max_examples=40, deadline=None)
@given(parent_lists)
def test_depths_and_ancestors(parents):
    batch = jnp.array([parents, parents])
    depth = operations.depths(batch)
    mask = np.asarray(operations.ancestor_mask(batch))
    for i in range(len(parents)):
        chain = [i]
        while chain[-1] != 0:
            chain.append(parents[chain[-1]])
        assert depth[1, i] == len(chain) - 1
        assert set(np.flatnonzero(mask[0, i])) == set(chain)
    static = np.asarray(batch)  # stays numpy: shapes that a program need not compute
    assert isinstance(operations.ancestor_mask(static), np.ndarray) and isinstance(
        operations.depths(static), np.ndarray
    )
    assert (operations.ancestor_mask(static) == mask).all() and (operations.depths(static) == depth).all()


@settings(max_examples=40, deadline=None)
@given(parent_lists, st.data())
def test_compact_keeps_the_tree_of_valid_nodes(parents, data):
    n = len(parents)
    valid = [True]
    for i in range(1, n):
        valid.append(valid[parents[i]] and data.draw(st.booleans()))
    tokens = list(range(100, 100 + n))
    tree = operations.compact(TokenTree(jnp.array([tokens]), jnp.array([parents]), jnp.array([valid])))
    count = sum(valid)
    assert tree.valid[0].tolist() == [True] * count + [False] * (n - count)
    valid_tokens = [t for t, v in zip(tokens, valid, strict=True) if v]
    assert tree.tokens[0, :count].tolist() == valid_tokens
    for i in range(1, count):  # the parent's token is the one it was
        assert int(tree.tokens[0, tree.parents[0, i]]) == 100 + parents[valid_tokens[i] - 100]
    assert (np.asarray(tree.parents[0]) < np.arange(n)).all()


def test_template():
    template = Template([(1,), (0,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    assert template.parents.tolist() == [-1, 0, 0, 1, 1, 2, 3]
    assert template.ranks.tolist() == [0, 0, 1, 0, 1, 0, 0]
    assert template.levels == [(0, 1), (1, 3), (3, 6), (6, 7)]
    with pytest.raises(ValueError, match=r"\(2, 0\) of the tree has no parent; add \(2,\)"):
        Template([(0,), (2, 0)])
