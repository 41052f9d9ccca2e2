"""Every diffusion method of the catalogue: what holds for all of them."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys
from tiers import those

import specjax
from specjax.catalog import METHODS, of_kind
from specjax.diffusion import methods
from specjax.diffusion.methods.constraint import TokenAutomaton
from specjax.diffusion.methods.learn2pd import above
from specjax.diffusion.procedures import procedure_of
from specjax.errors import UsageError

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8]]
ROWS = of_kind("diffusion")
GIVEN = {
    "learn2pd": {"filter": above(0.03, 8)},
    "constraint": {"automaton": TokenAutomaton(np.arange(64)[None].repeat(3, 0) % 3, [True] * 3)},
}
"""What a method needs besides its denoiser."""


def denoiser_of(method: str):
    """The first denoiser that the method takes."""
    for denoiser in (toys.full(), toys.causal(), toys.causal(4, "seed_and_mask"), toys.full("shifted")):
        try:
            procedure_of(method, denoiser, **GIVEN.get(method, {}))
        except UsageError:
            continue
        return denoiser
    raise AssertionError(method)


def test_the_table_has_every_method():
    assert sorted(ROWS) == sorted(methods.__all__)


@pytest.mark.parametrize("name", ROWS)
def test_options_and_defaults_are_the_functions(name):
    _, *parameters = inspect.signature(METHODS[name].make).parameters.values()
    row = METHODS[name]
    files = {option.name for option in row.options if option.type == "filter"}
    assert {p.name for p in parameters if p.name in row.needs} == row.needs == set(GIVEN.get(name, ())) - files
    options = [(p.name, p.default) for p in parameters if p.name not in row.needs]
    assert options == [(option.name, option.default) for option in row.options]


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_independent_prompts_stay_and_every_pass_goes_on(name):
    denoiser = denoiser_of(name)
    settings, method = {"max_new_tokens": 14, "temperature": 0.8}, procedure_of(name, denoiser, **GIVEN.get(name, {}))
    batch = specjax.denoise(denoiser, method, PROMPTS, key=5, **settings)
    assert batch.lengths.tolist() == [14, 14] and np.all(batch.tokens < 64) and not np.any(batch.tokens == toys.MASK)
    order = np.asarray(batch.decided_at)
    assert np.all(order >= 0) and np.all(batch.stats.target_passes <= 2 * 14 + 8)
    for row, key in enumerate(toys.keys_of(5, 2)):
        alone = specjax.denoise(denoiser, method, [PROMPTS[row]], key=key[None], **settings)
        assert alone.to_lists()[0] == batch.to_lists()[row]


@pytest.mark.parametrize("name", those(["ete"], ROWS))
def test_a_temperature_of_0_in_an_array_gives_the_greedy_text(name):
    """A program whose temperature is traced draws nothing in such rows either, and ranks columns as without."""
    denoiser = denoiser_of(name)
    method = procedure_of(name, denoiser, **GIVEN.get(name, {}))
    greedy, traced = (
        specjax.denoise(denoiser, method, PROMPTS, key=5, max_new_tokens=10, temperature=temperature)
        for temperature in (0.0, jnp.zeros(2))
    )
    assert traced.to_lists() == greedy.to_lists() and traced.decided_at.tolist() == greedy.decided_at.tolist()
