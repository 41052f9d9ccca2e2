"""An update that a step needs now and then costs nothing in the other steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.arrays.branching import update_if
from specjax.drafters.layers import sparse_cache
from specjax.types import Context, Target


def untied(is_needed, update, inputs, state):
    """Run the update in a loop whose inputs do not change, as a mutant."""
    return jax.lax.fori_loop(0, is_needed.astype(jnp.int32), lambda _, state: update(inputs, state), state)


def operations_in_front(program, name: str) -> int:
    """Count the operations of a loop's body with a name that the compiled program runs in front of the loop."""
    text = program.compile().as_text()
    return len(re.findall(rf'op_name="[^"]*while/body[^"]*{name}', text[text.index("ENTRY") :]))


@pytest.mark.parametrize("is_needed", [False, True])
def test_the_state_changes_if_the_update_is_needed(is_needed):
    run = jax.jit(lambda is_needed, inputs, state: update_if(is_needed, lambda x, y: y + x["a"], inputs, state))
    state = run(jnp.bool_(is_needed), {"a": jnp.array([3, 4])}, jnp.ones(2))
    np.testing.assert_array_equal(state, [4, 5] if is_needed else [1, 1])


def lowered_update(selection: str):
    """Return the lowered program that brings the small cache of `sparse_cache` up to the text."""
    target = depths.target(False)
    settings = sparse_cache.SelectionSettings(selection, 7, 2, 4, 3, 5, 0)
    cache = target.model.init_cache(target.params, None, 1, 128)._replace(length=jnp.array([100]))
    context = Context(jnp.arange(128)[None] % 60, jnp.array([101]), cache=cache, target=target)
    state = sparse_cache.empty_state(target.model, settings, context, 8)

    def follow(state, context, weights, drafting):
        context = context._replace(target=Target(target.model, weights))
        return sparse_cache.follow(target.model, settings, 4, state, context, drafting)

    return jax.jit(follow).lower(state, context._replace(target=None), target.params, jnp.array([True]))


def count_selections() -> list[int]:
    """Return the operations of a selection that run in front of the loop: now, and with the mutant."""
    counts = []
    for update in (update_if, untied):
        sparse_cache.update_if = update
        counts.append(operations_in_front(lowered_update("retrieval"), "top_k"))
    return counts


def test_an_update_without_a_new_selection_selects_nothing():
    """Count in a process of its own, because the flags of the tests leave out the pass of XLA that moves operations."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "import test_branching as test; print(*test.count_selections())"]
    result = subprocess.run(
        command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    count, count_of_mutant = map(int, result.stdout.split()[-2:])
    assert count == 0 < count_of_mutant
