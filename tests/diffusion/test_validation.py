"""Settings of methods: what they may be, and that equal ones share their parts."""

import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys

from specjax import UsageError
from specjax.catalog import METHODS, of_kind
from specjax.diffusion import methods
from specjax.diffusion.methods.constraint import TokenAutomaton
from specjax.diffusion.procedures import procedure_of
from specjax.diffusion.validation import checked


@pytest.mark.parametrize(
    "name, settings, words",
    [
        ("fast_dllm", {"rule": "thresholds"}, "rule must be one of threshold, factor, not 'thresholds'"),
        ("fast_dllm", {"memory": "suffix"}, "memory must be one of exact, dual, prefix"),
        ("fast_dllm", {"memory": ["dual"]}, "memory must be one of exact, dual"),
        ("fast_dllm", {"tau": "0.9"}, "tau must be a number, not '0.9'"),
        ("fast_dllm", {"tau": float("nan")}, "tau must be a number, not nan"),
        ("fast_dllm", {"tau": None}, "tau must be a number, not None"),
        ("fast_dllm", {"tau": np.array([0.9, 0.8])}, "tau must be a number"),
        ("fast_dllm", {"block": 8.0}, "block must be a whole number, not 8.0"),
        ("llada", {"steps": True}, "steps must be a whole number, not True"),
        ("llada", {"by": "sureness"}, "by must be one of confidence, "),
        ("dream", {"alg": "maskgit"}, "alg must be one of origin, maskgit_plus"),
        ("dream", {"alg_temp": 0.5}, "alg origin has no score for alg_temp"),
        ("ccd", {"dynamic": "no"}, "dynamic must be True or False, not 'no'"),
        ("adablock", {"delimiters": 198}, "delimiters must be whole numbers, as a tuple, not 198"),
        ("eoser", {"parts": 4}, "parts needs ascending passes"),
        ("credit_decoding", {"beta": -0.1}, "beta and gamma must be at least 0"),
        ("llada", {"tau": 0.9}, "method llada has no option tau"),
    ],
)
def test_a_setting_that_is_none_is_refused_in_a_sentence(name, settings, words):
    with pytest.raises(UsageError) as error:
        procedure_of(name, toys.full(), **settings)
    assert words in str(error.value)


def test_those_of_block_causal_models_too():
    denoiser = toys.causal()
    with pytest.raises(UsageError, match="remasking must be one of dynamic, static, sequential"):
        methods.sdar(denoiser, remasking="random")
    with pytest.raises(UsageError, match="block-causal model has fixed blocks; leave ascending out"):
        methods.eoser(denoiser, ascending=True)
    with pytest.raises(UsageError, match="tau needs a method given by name"):
        procedure_of(methods.sdar(denoiser), denoiser, tau=0.5)


FIXED = [name for name, row in of_kind("diffusion").items() if row.option("block") and name != "ete"]


@pytest.mark.parametrize("name", FIXED)
def test_a_block_causal_model_has_its_own_blocks(name):
    """Another size is refused, and the model's own size changes nothing."""
    denoiser, messages = toys.causal(), []
    for block in (8, 32):
        with pytest.raises(UsageError) as error:
            procedure_of(name, denoiser, block=block, **given(name))
        messages.append(str(error.value))
    try:
        plain = procedure_of(name, denoiser, **given(name))
    except UsageError as refusal:
        assert "block-causal" in str(refusal) and set(messages) == {str(refusal)}
    else:
        assert messages[0].startswith("block=8 differs from the model's blocks of 4 columns")
        assert procedure_of(name, denoiser, block=4, **given(name)) == plain or name == "constraint"


def given(name):
    return {"automaton": TokenAutomaton(np.zeros((1, 64), int), [True])} if name == "constraint" else {}


@pytest.mark.parametrize(
    "name, settings, words",
    [
        (
            "s2d2_routed",
            {"min_run": 3},
            "min_run has no effect with router=score; leave min_run out, or set router=span",
        ),
        ("s2d2_routed", {"router": "always", "cost": 2.0}, "set router=score or router=hysteresis"),
        ("s2d2_routed", {"router": "span", "beta": 2.0}, "beta has no effect with router=span"),
        ("s2d2_routed", {"chance": "margin", "beta": 2.0}, "beta has no effect with chance=margin"),
        ("s2d2_routed", {"below": -1.0}, "below has no effect with router=score"),
        ("sdar", {"remasking": "sequential", "tau": 0.5}, "tau has no effect with remasking=sequential"),
        ("sdar", {"remasking": "any", "tau": 0.5}, "remasking must be one of"),
        ("dimple", {"prefill": False}, "prefill=False has no effect for a block-causal model"),
    ],
)
def test_a_setting_without_effect_is_refused(name, settings, words):
    with pytest.raises(UsageError) as error:
        procedure_of(name, toys.causal(), **settings)
    assert words in str(error.value)


def test_numbers_of_every_library_make_one_rule():
    denoiser = toys.full()
    rule = methods.fast_dllm(denoiser, tau=0.5).rule
    for tau in (np.float32(0.5), np.array(0.5), jnp.float32(0.5)):
        assert methods.fast_dllm(denoiser, tau=tau).rule is rule
    schedule = methods.llada(denoiser, block=8).schedule
    assert methods.llada(denoiser, block=np.int64(8)).schedule is schedule
    assert methods.llada(denoiser, block=jnp.int32(8)).schedule is schedule
    assert methods.prophet(denoiser, early=float("inf")).control is not None
    assert methods.adablock(denoiser, delimiters=[3, np.int32(4)]).schedule is not None


def test_what_traces_is_no_setting():
    import jax

    with pytest.raises(UsageError, match="tau is a traced value"):
        jax.jit(lambda tau: methods.fast_dllm(toys.full(), tau=tau) and tau)(0.5)


def test_every_method_is_checked():
    plain = [name for name in of_kind("diffusion") if not hasattr(METHODS[name].make, "__wrapped__")]
    assert plain == [] and checked.__name__ == "checked"
