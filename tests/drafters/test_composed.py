"""What drafters made of others pass on."""

import pytest

from specjax import UsageError
from specjax.drafters import choice, prompt_lookup, rasd, suffix, token_recycling


def test_layers_that_a_part_reads_are_asked_of_the_target():
    reading = token_recycling(64, num_nodes=7).replace(taps=(1, 2))
    assert choice(prompt_lookup(3), reading).taps == rasd(reading, suffix(3)).taps == (1, 2)
    assert choice(prompt_lookup(3), suffix(3)).taps == ()
    with pytest.raises(UsageError, match="read different layers"):
        choice(prompt_lookup(3).replace(taps=(0,)), reading)
