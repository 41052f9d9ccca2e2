"""What a drafter hands on from one call, or one request, to the next.

What a program hands through, it copies: a corpus, a draft model. So programs mark the parameters that stay as they are,
and outside of them these are put back in the place of the marks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from specjax.arrays.x64 import without_x64
from specjax.types import STATIC, Context, Drafter, PyTree, Target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Unchanged:
    """In the place of a parameter that is the drafter's own, counted among these."""

    number: int = field(metadata=STATIC)


def export_params(drafter: Drafter, draft: PyTree) -> Drafter:
    """Inside of a program: the drafter with what its state `draft` has to remember, for `restore_params`."""
    params = drafter.params if drafter.hooks.export is None else drafter.hooks.export(drafter.params, draft)
    number = {id(x): n for n, x in enumerate(jax.tree.leaves(drafter.params))}
    mark = lambda x: _Unchanged(number[id(x)]) if id(x) in number else x
    return drafter.replace(params=jax.tree.map(mark, params))


def restore_params(drafter: Drafter, of_program: PyTree) -> PyTree:
    """The drafter that `export_params` of this one gave a program, whole; None if it gave none."""
    own = jax.tree.leaves(drafter.params)
    is_mark = lambda x: isinstance(x, _Unchanged)
    return jax.tree.map(lambda x: own[x.number] if is_mark(x) else x, of_program, is_leaf=is_mark)


def learned(drafter: Drafter, draft: PyTree) -> Drafter:
    """The drafter with what its state `draft` has to remember."""
    return restore_params(drafter, _lesson(drafter, draft))


def canonical(target: Target, drafter: Drafter) -> Drafter:
    """The drafter with parameters of the form that `remember` gives, and nothing added to what they say: those of a
    first call and of all that go on from it are then arguments of one program."""
    return restore_params(drafter, _settled(target, drafter))


_lesson = jax.jit(without_x64(export_params))


@jax.jit
@without_x64
def _settled(target: Target, drafter: Drafter) -> Drafter:
    context = Context(jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32), target=target)
    return export_params(drafter, drafter.init(drafter.params, context))
