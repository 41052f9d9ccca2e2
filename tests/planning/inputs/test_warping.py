"""Sampling options of a plan: what its programs compute."""

import jax
import jax.numpy as jnp
import pytest
import tpu

from specjax import UsageError
from specjax.planning.abstract import abstract_job
from specjax.planning.compiler import compile_programs
from specjax.planning.inputs.warping import Warping
from specjax.planning.workload import describe, make_workload


def test_a_program_has_the_options_that_are_given():
    """Options are traced arrays, whatever their values; at temperature 0 there are none of them."""
    place = lambda shape: shape
    assert set(Warping(top_k=40, top_p=0.9).sampling(place)) == {None}
    sampling = Warping(0.7, 40, 0.9, 0.05).sampling(place)
    assert [x.dtype for x in sampling] == [jnp.float32, jnp.int32, jnp.float32, jnp.float32]
    assert [x is None for x in Warping(1.0, min_p=0.1).sampling(place)] == [False, True, True, False]


def test_penalties_are_processors_of_shapes():
    built = Warping(repetition_penalty=1.2, frequency_penalty=0.5).processors(lambda shape: shape)
    assert len(built) == 2
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(built))


def test_a_plan_names_its_options_and_its_job_has_them():
    options = {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5}
    work = make_workload("smollm2_135m", "v5e:1x1", context=64, max_new_tokens=8, **options)
    assert options.items() <= describe(work).items()
    assert work != make_workload("smollm2_135m", "v5e:1x1", context=64, max_new_tokens=8, temperature=0.7)
    parts = abstract_job(work, list(tpu.devices("v5e:1x1"))).job.parts
    assert parts.sampling.top_p is not None and parts.sampling.top_k is None
    assert len(parts.processors) == 1


@pytest.mark.tpu_compile
@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [1, 64])
def test_top_p_costs_a_fraction_of_a_step(batch, monkeypatch, tmp_path):
    """Gemma 3 270M has 262,144 tokens; by the compiler's schedule, per step of the plain program."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def seconds(**options):
        work = make_workload("gemma3_270m", "v5e:1x1", batch=batch, temperature=0.7, **options)
        (report,) = compile_programs(work, False, lambda name: None, only=("step",))
        return report.seconds["schedule"]

    assert seconds(top_p=0.9) <= 1.25 * seconds()


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1.5, 0])
def test_numbers_that_no_top_k_can_be_are_refused(number):
    with pytest.raises(UsageError, match="--top-k must be a whole number of at least 1"):
        Warping(1.0, top_k=number).check()
