"""Rounds of a run: they are those of `decode`, and what they say of drafts is what target and drafter said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers
from toy import DRAFT_ROWS, TARGET_ROWS, branching_drafter, markov, tiny_llama
from toy_models import encoding, inputs_of

import specjax
from specjax import costs, drafters, trees
from specjax.analysis.drawing import best, draw
from specjax.analysis.explain import Round

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


def told(drafter, target=None, new=24, **options):
    target = target or tiny_llama()
    options = {"key": 3, "max_new_tokens": new} | options
    rounds = specjax.explain(target, drafter, PROMPT, **options)
    options.pop("costs", None)
    return rounds, specjax.decode(target, drafter, [PROMPT], **options)


@pytest.mark.parametrize(
    ("drafter", "temperature"),
    [
        (drafters.prompt_lookup(num_tokens=4), 0.0),
        (
            drafters.choice(
                drafters.prompt_lookup(num_tokens=3), drafters.token_recycling(64, num_nodes=4), depths=(2,)
            ),
            0.9,
        ),
    ],
)
def test_rounds_are_those_of_decode(drafter, temperature):
    """The second learns from what the passes saw, which depends on their width."""
    rounds, result = told(drafter, temperature=temperature)
    assert [token for one in rounds for token in one.added] == result.to_lists()[0]
    assert len(rounds) == int(result.stats.target_passes[0])
    assert sum(one.drafted for one in rounds) == int(result.stats.accepted[0])
    assert sum(len(one.tokens) - 1 for one in rounds) == int(result.stats.drafted[0])


def test_chances_are_those_of_the_target_behind_the_parent():
    """The chances equal the target's rows, for a model whose next token depends on the last one alone."""
    rows = np.asarray(TARGET_ROWS)
    rounds = specjax.explain(
        markov(), branching_drafter((2, 2)).replace(params=DRAFT_ROWS), [0], key=1, max_new_tokens=12
    )
    assert any(len(one.tokens) > 3 for one in rounds)
    for one in rounds:
        expected = [1.0, *rows[one.tokens[one.parents[1:]], one.tokens[1:]]]
        np.testing.assert_allclose(one.chances, expected, atol=1e-5)


def test_the_accepted_path_is_one():
    rounds, _ = told(drafters.token_recycling(64))
    assert any(one.drafted for one in rounds)
    for one in rounds:
        on = np.flatnonzero(one.accepted)
        assert on[0] == 0 and len(on) == one.drafted + 1
        assert one.parents[on[1:]].tolist() == on[:-1].tolist()
        assert one.tokens[on[1:]].tolist() == one.added[: one.drafted]
        assert (one.parents[1:] < np.arange(1, len(one.parents))).all() and one.parents[0] == -1


def test_equal_siblings_are_one_context():
    """A rule may go on below any of several equal drafts, and some path of the picture has the accepted tokens."""
    drafter = drafters.two_model(markov(DRAFT_ROWS), tree=trees.branching("4x3x2", "with_replacement"))
    options = {"key": 2, "max_new_tokens": 30, "temperature": 1.0}
    rounds = specjax.explain(markov(), drafter, [0], **options)
    result = specjax.decode(markov(), drafter, [[0]], **options)
    assert [token for one in rounds for token in one.added] == result.to_lists()[0]
    for one in rounds:
        on = np.flatnonzero(one.accepted)
        assert one.parents[on[1:]].tolist() == on[:-1].tolist()
        assert one.tokens[on[1:]].tolist() == one.added[: one.drafted]
        assert draw([one], str).startswith(b"\x89PNG")


def test_a_model_without_parameters():
    target = specjax.as_target(lambda params, tokens: jax.nn.one_hot(tokens + 1, 64), (), max_positions=256)
    rounds = specjax.explain(target, drafters.prompt_lookup(num_tokens=4), PROMPT, key=0, max_new_tokens=8)
    assert [token for one in rounds for token in one.added] == list(range(7, 15))
    assert {one.width for one in rounds} == {1, 5}


def test_a_model_that_reads_more_than_tokens():
    options = {"key": 0, "max_new_tokens": 8, "inputs": inputs_of(1)}
    rounds = specjax.explain(encoding(), "prompt_lookup", [1, 2], **options)
    result = specjax.decode(encoding(), "prompt_lookup", [[1, 2]], **options)
    assert [token for one in rounds for token in one.added] == result.to_lists()[0]


def test_what_it_does_not_tell_is_refused():
    for name in ("logprobs", "debug"):
        with pytest.raises(specjax.UsageError, match=f"explain does not report {name}; leave it out"):
            told("prompt_lookup", **{name: True})


def test_a_run_without_numbers_is_refused():
    target = tiny_llama()
    params = {**target.params, "head": {"weight": target.params["head"]["weight"] * np.nan}}
    with pytest.raises(specjax.UsageError, match=r"because its parameter head\.weight contains NaN"):
        specjax.explain(specjax.Target(target.model, params), "prompt_lookup", PROMPT, key=0, max_new_tokens=4)
    nothing = specjax.Processor(process=lambda params, state, tree, above, logits: jnp.full_like(logits, -jnp.inf))
    with pytest.raises(specjax.UsageError, match="the processors allow no token"):
        specjax.explain(target, "prompt_lookup", PROMPT, key=0, max_new_tokens=4, processors=[nothing])


def test_costs_are_those_of_the_width_that_holds_the_tree():
    curve = costs.Curve((1, 9), (1.0, 5.0))
    rounds, _ = told(drafters.prompt_lookup(num_tokens=4), costs=curve)
    assert {one.width for one in rounds} == {1, 5}
    assert {(one.width, one.cost) for one in rounds} == {(1, 1.0), (5, 3.0)}


def test_auto_says_why():
    rounds, _ = told("auto", new=40)
    for one in rounds:
        assert one.why.startswith("expects to save" if len(one.tokens) > 1 else ("drafted, but", "pauses: ")), one
    assert any(len(one.tokens) > 1 for one in rounds)


def test_auto_says_when_it_rests():
    """On a text that repeats nothing the promises fall, and `auto` pauses."""
    uniform = markov(np.full((64, 64), 1 / 64))
    rounds = specjax.explain(uniform, "auto", [0], key=0, max_new_tokens=60, temperature=1.0)
    rests = [one for one in rounds if one.why.startswith("pauses")]
    assert rests and all(len(one.tokens) == 1 for one in rests)


def test_a_denoiser_is_refused():
    with pytest.raises(specjax.UsageError, match="this is a diffusion model; use denoise"):
        specjax.explain(toy_denoisers.full(), None, PROMPT, key=0, max_new_tokens=8)


def one_round(parents, accepted, chances=None):
    count = len(parents)
    chances = np.ones(count) if chances is None else np.asarray(chances)
    added = np.arange(count)[np.asarray(accepted, bool)][1:].tolist()
    return Round(
        np.arange(count), np.asarray(parents), chances, np.asarray(accepted, bool), [*added, 99], len(added), count,
        1.5, None,
    )  # fmt: skip


def test_the_tree_drawn_is_that_which_kept_most():
    rounds = [one_round([-1], [1]), one_round([-1, 0, 0], [1, 0, 1]), one_round([-1, 0, 1, 0], [1, 1, 1, 0])]
    assert best(rounds) == 2
    pictures = {draw(rounds, str, number) for number in (None, 0, 2)}
    assert len(pictures) == 2 and all(picture.startswith(b"\x89PNG") for picture in pictures)


def test_what_tokens_and_names_say_is_no_formula(recwarn):
    """Other people name models and write tokens."""
    rounds = [one_round([-1, 0], [1, 1])]
    draw(rounds, lambda token: f"'$x^$ \u4f60{token}'", title="of $b^$")
    assert not recwarn.list


def test_of_a_wide_tree_the_likeliest_branches_are_drawn():
    from specjax.analysis.drawing import MOST_LEAVES, _select_nodes

    chances = [1.0, *np.linspace(0.001, 0.02, 60)]
    one = one_round([-1, *[0] * 60], [1, 1, *[0] * 59], chances)
    drawn = _select_nodes(one)
    assert len(drawn) == MOST_LEAVES + 1
    assert drawn == [0, 1, *range(61 - (MOST_LEAVES - 1), 61)]
