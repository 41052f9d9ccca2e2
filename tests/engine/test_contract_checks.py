"""A user's own part that gives arrays of another form is named, with the field, before anything runs."""

import jax
import jax.numpy as jnp
import pytest
from toy import branching_drafter, markov

from specjax import UsageError, decode
from specjax.drafters import prompt_lookup
from specjax.types import Controller


def run(target=None, drafter=None, **options):
    target, drafter = target or markov(), drafter or prompt_lookup(2)
    return decode(target, drafter, [[0]], key=jax.random.key(0), max_new_tokens=4, **options)


def proposing(drafter, change):
    def propose(*arguments):
        return change(*drafter.propose(*arguments))

    return drafter.replace(propose=propose)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree, state: (tree._replace(tokens=tree.tokens[:, :2]), state), "tokens as integers .* not int32.1, 2"),
        (lambda tree, state: (tree._replace(tokens=tree.tokens + 0.5), state), "tokens as integers .* not float32"),
        (lambda tree, state: (tree._replace(valid=tree.tokens), state), "tree.valid as booleans .* not int32"),
        (lambda tree, state: (tree._replace(parents=[-1, 0, 1]), state), "tree.parents as integers .* not list"),
        (lambda tree, state: (tuple(tree), state), r"must return \(TokenTree, state\), but its first result is"),
        (lambda tree, state: (tree, jnp.zeros(3)), "the drafter's update .* must return its state in the same form"),
    ],
)  # fmt: skip
def test_a_drafter(change, message):
    with pytest.raises(UsageError, match=message) as error:
        run(drafter=proposing(prompt_lookup(2), change))
    assert "\n" not in str(error.value)


def test_a_drafter_that_says_it_samples_must_give_logits():
    plain = branching_drafter((2,))
    silent = proposing(plain, lambda tree, state: (tree._replace(logits=None), state))
    with pytest.raises(UsageError, match=r"the rule needs the draft's tree\.logits"):
        run(drafter=silent.replace(params=markov().params), temperature=1.0)


def test_a_model():
    target = markov()
    model = target.model

    def forward(*arguments, **options):
        output, pending = model.forward(*arguments, **options)
        return output._replace(logits=output.logits[..., :-1]), pending

    wrong = type(target)(model._replace(forward=forward, name="mine"), target.params)
    with pytest.raises(UsageError, match=r"forward of the model mine must return logits as floats \[1, 1, 3\]"):
        run(wrong)
    grows = model._replace(commit=lambda cache, *_: (cache, 0), name="mine")
    with pytest.raises(UsageError, match="commit of the model mine must return its state in the same form"):
        run(type(target)(grows, target.params))


def test_a_rule():
    with pytest.raises(UsageError, match="the rule mine must return a Verdict, not a tuple"):

        def mine(keys, tree, logits):
            return tree.tokens, tree.tokens[:, 0], tree.tokens[:, 0]

        run(verifier=mine)


def test_a_controller():
    fixed = lambda limit: Controller(lambda batch: (), lambda state: limit, lambda state, info: state)
    with pytest.raises(UsageError, match=r"the controller must return limit as integers \[1\], not int"):
        run(controller=fixed(2))
    counting = Controller(
        lambda batch: jnp.zeros(batch, jnp.int32), lambda state: state, lambda state, info: state + 0.5
    )
    with pytest.raises(UsageError, match="the controller's update must return its state in the same form: int32"):
        run(controller=counting)
