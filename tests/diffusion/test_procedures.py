"""Tests of the procedures that the methods are compared with."""

import pytest
import toy_denoisers as toys

from specjax.catalog import METHODS
from specjax.diffusion import methods
from specjax.diffusion.procedures import ONE, reference_of


def reference(name, denoiser, *, is_greedy=True, **options):
    procedure = METHODS[name].make(denoiser, **options)
    return reference_of(METHODS[name], denoiser, procedure, options, is_greedy=is_greedy)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_the_text_of_a_method_without_drafts_is_promised_at_every_temperature(is_greedy):
    denoiser = toys.full()
    ours = reference("freedave", denoiser, steps=3, by="margin", is_greedy=is_greedy)
    assert ours.procedure == methods.llada(denoiser, steps=3, by="margin") and ours.is_promised and ours.name != ONE
    plain = reference("freedave", denoiser, block=8, is_greedy=is_greedy)
    assert plain.procedure == methods.llada(denoiser, block=8) and plain.is_promised and plain.name == ONE


@pytest.mark.parametrize(("name", "alignment"), [("linear_spec", "shifted"), ("s2d2", "same")])
def test_the_text_of_a_verified_method_is_that_of_blocks_of_one_at_temperature_0(name, alignment):
    denoiser = toys.causal()
    greedy, sampled = (reference(name, denoiser, is_greedy=is_greedy) for is_greedy in (True, False))
    assert greedy.denoiser.block == 1 and greedy.denoiser.alignment == alignment
    assert greedy.denoiser.params is denoiser.params and greedy.procedure.schedule.width == 1
    assert greedy.is_promised and not sampled.is_promised


def test_other_methods_are_compared_with_one_column_per_pass_in_their_own_blocks():
    denoiser = toys.full()
    for name, options, width in (
        ("fast_dllm", {}, 32), ("fast_dllm", {"block": 8}, 8), ("eoser", {}, None), ("dream", {}, None),
        ("window_diffusion", {}, None), ("adablock", {}, 32),
    ):  # fmt: skip
        ours = reference(name, denoiser, **options)
        assert ours.procedure == methods.llada(denoiser, block=width) and not ours.is_promised and ours.name == ONE
    assert reference("sdar", toys.causal()).procedure == methods.sdar(toys.causal(), remasking="static")
