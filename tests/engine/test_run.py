"""Programs of a job: how many there are, and that `start` and `step` are what `run` loops."""

import jax
import numpy as np
import pytest
from toy import markov

from specjax import Settings, UsageError, decode, drafters, serve, stream
from specjax.engine import prepare as preparing
from specjax.engine.run import run, start, step
from specjax.engine.step import BUCKET, buffer_size

KEY = jax.random.key(0)


def test_a_chat_that_grows_compiles_a_handful_of_programs():
    """A text that grows from 1 to 900 tokens, with another number of new ones at every turn, compiles at most 6
    programs."""
    target, drafter = markov(), drafters.prompt_lookup(4)
    num_programs, sizes = run._cache_size(), set()
    for turn, length in enumerate(range(1, 900, 37)):
        new = (3, 40, 17, 90)[turn % 4]
        result = decode(target, drafter, [[turn % 3] * length], key=KEY, max_new_tokens=new)
        assert result.tokens.shape == (1, new) and result.lengths.tolist() == [new]
        sizes.add(buffer_size(length, new, drafter.num_nodes, target.model.max_positions))
    assert run._cache_size() - num_programs == len(sizes) <= 6


@pytest.mark.parametrize("longest", [1, 100, 127, 128, 129, 500, 1000, 5000])
@pytest.mark.parametrize("new", [1, 128, 1000])
def test_a_buffer_has_room_for_all_that_is_written_and_little_more(longest, new):
    drafter = drafters.prompt_lookup(30)
    needed = longest + max(new + drafter.num_nodes, BUCKET) + 1
    size = buffer_size(longest, new, drafter.num_nodes)
    assert needed <= size <= max(needed * 3 / 2, 2 * BUCKET) and size % BUCKET == 0
    tight = buffer_size(longest, new, drafter.num_nodes, capacity=longest + new)
    assert needed <= tight <= min(size, longest + new + 2 * BUCKET)


def test_start_and_step_are_what_run_loops():
    settings = Settings(temperature=0.9)
    job = preparing.prepare(
        markov(), drafters.prompt_lookup(4), [[0, 1, 0, 1], [2]], settings, key=KEY, max_new_tokens=9
    )
    result, state, passes = run(job).cut(9), start(job), 0
    over = False
    while not over:
        state, _, over = step(job.parts, state)
        passes += 1
    ours = [np.asarray(state.tokens)[b, n : n + 9].tolist() for b, n in enumerate((4, 1))]
    assert ours == result.to_lists()
    assert passes == int(result.stats.target_passes.max())


def test_prompts_longer_than_their_array_are_refused():
    with pytest.raises(UsageError, match="prompt 1 has the length 9, but the array of prompts has 4 columns"):
        decode(markov(), None, (np.zeros((2, 4), np.int32), np.array([4, 9])), key=KEY, max_new_tokens=4)


def test_stream_and_serve_refuse_what_they_do_not_report():
    with pytest.raises(UsageError, match="stream does not report debug"):
        stream(markov(), None, [[0]], key=KEY, max_new_tokens=4, debug=True)
    with pytest.raises(UsageError, match="serve does not report logprobs"):
        serve(markov(), None, [], slots=1, longest_prompt=4, max_new_tokens=4, logprobs=True)


def test_the_last_step_of_a_stream_has_what_was_learnt():
    """The drafter for the next call, as `decode` gives it."""
    drafter = drafters.token_recycling(3, num_nodes=7)
    result = decode(markov(), drafter, [[0, 1], [2]], key=KEY, max_new_tokens=9)
    *earlier, last = stream(markov(), drafter, [[0, 1], [2]], key=KEY, max_new_tokens=9)
    assert all(step.drafter is None for step in earlier)
    ours, theirs = (jax.tree.leaves(one.params) for one in (last.drafter(), result.drafter))
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(x, y)
    *_, last = stream(markov(), drafters.prompt_lookup(4), [[0]], key=KEY, max_new_tokens=9)
    assert last.drafter is None
