"""A controller narrows the pass of every drafter that asks a model, and where it forbids drafts no model drafts."""

import jax
import jax.numpy as jnp
import pytest
from toy import DRAFT_ROWS, markov

from specjax import controllers, decode, drafters, trees
from specjax.drafters.model.two_model import CATCH_UP
from specjax.engine.prefill import CHUNK
from specjax.types import Controller, Target

NEW = 40
ALL = {  # what drafts, and the widths of passes at the depths 0, 2, 3 and without a limit
    "chain": (lambda target, draft: drafters.two_model(draft, 7), [1, 4, 4, 8]),
    "branching": (lambda target, draft: drafters.two_model(draft, tree=trees.parse("3x2x1")), [1, 10, 16, 16]),
    "beam": (lambda target, draft: drafters.two_model(draft, tree=trees.parse("beam:3x6")), [1, 10, 10, 19]),
    "dyspec": (lambda target, draft: drafters.two_model(draft, tree=trees.parse("dyspec:7")), [1, 8, 8, 8]),
    "eagle2": (lambda target, draft: drafters.two_model(draft, tree=trees.parse("eagle2:2x4x11")), [1, 8, 12, 12]),
    "easyspec": (lambda target, draft: drafters.easyspec(draft, 7), [1, 4, 4, 8]),
    "rapid": (lambda target, draft: drafters.rapid(draft, 7), [1, 4, 4, 8]),
    "hierarchical": (lambda target, draft: drafters.hierarchical(draft, drafters.prompt_lookup(3)), [1, 4, 4, 10]),
    "early_exit": (lambda target, draft: drafters.early_exit(target, num_tokens=7), [1, 4, 4, 8]),
    "swift": (lambda target, draft: drafters.swift(target, 7, layers=(0, 1), stop=0, window=4), [1, 4, 4, 8]),
    "superposed": (lambda target, draft: drafters.superposed(target, drafts=2, num_tokens=7), [1, 5, 9, 15]),
    "jacobi": (lambda target, draft: drafters.jacobi(3, window=7), [1, 4, 4, 8]),
}


def recorded(name, target, passes):
    """The model, whose passes of the loop note its name and their widths; those of a part of its layers do not."""

    def forward(params, tokens, cache, **options):
        if "layers" not in options:
            jax.debug.callback(lambda: passes.append((name, options["positions"].shape[1])), ordered=True)
        return target.model.forward(params, tokens, cache, **options)

    return Target(target.model._replace(forward=forward), target.params)


def ran(name, controller):
    """The passes: (whose, how wide)."""
    passes = []
    target, draft = recorded("target", markov(), passes), recorded("draft", markov(DRAFT_ROWS), passes)
    result = decode(
        target, ALL[name][0](target, draft), [[0, 1, 2, 0, 1], [2]], key=jax.random.key(0), max_new_tokens=NEW,
        temperature=1.0, controller=controller,
    )  # fmt: skip
    jax.effects_barrier()
    assert result.lengths.tolist() == [NEW, NEW]
    return [(whose, width) for whose, width in passes if width < CHUNK]


@pytest.mark.parametrize("name", ALL)
def test_a_pass_is_as_wide_as_the_limit_asks_for(name):
    limits = jnp.array([0, 2, 3, 99, 0])
    scripted = Controller(
        init=lambda batch: jnp.zeros((batch,), jnp.int32),
        limit=lambda state: limits[jnp.minimum(state, 4)],
        update=lambda state, info: state + 1,
    )
    passes = ran(name, scripted)
    rounds = [place for place, (whose, _) in enumerate(passes) if whose == "target"]
    assert [passes[place][1] for place in rounds[:4]] == ALL[name][1]
    assert len(rounds) > 5
    assert rounds[0] == 0 and passes[rounds[3] + 1 :] == [("target", 1)] * (len(rounds) - 4)


def test_goodput_stops_the_passes_of_a_dear_drafter():
    """But for the first round, and one to probe, before which the draft model reads what it has missed."""
    dear = controllers.goodput((0, 1, 3), costs=(1.0, 1.1, 1.2), draft_cost=4.5, start=0.1, probe_share=1.0)
    passes = ran("chain", dear)
    first, plain = [("draft", 2), ("target", 4)], [("target", 1)]
    assert passes[:9] == [*first, *plain * 3, ("draft", CATCH_UP), *first, *plain]
