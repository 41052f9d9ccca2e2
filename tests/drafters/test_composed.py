"""Calls that composed drafters pass on to the drafters inside them."""

import pytest

from specjax import UsageError
from specjax.drafters import choice, prompt_lookup, rasd, suffix, token_recycling
from specjax.types import Drafter


def with_taps(drafter: Drafter, taps: tuple[int, ...]) -> Drafter:
    return drafter.replace(traits=drafter.traits._replace(taps=taps))


def test_layers_that_a_part_reads_are_asked_of_the_target():
    reading = with_taps(token_recycling(64, num_nodes=7), (1, 2))
    assert choice(prompt_lookup(3), reading).traits.taps == rasd(reading, suffix(3)).traits.taps == (1, 2)
    assert choice(prompt_lookup(3), suffix(3)).traits.taps == ()
    with pytest.raises(UsageError, match="read different layers"):
        choice(with_taps(prompt_lookup(3), (0,)), reading)
