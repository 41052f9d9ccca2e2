"""Sizes as texts: small ones keep their digits."""

import pytest

from specjax.files.sizes import GIB, MIB, gib, gib_cell


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.00 GiB"),
        (MIB // 2, "0.5 MiB"),
        (12.34 * MIB, "12.3 MiB"),
        (0.1 * GIB, "0.10 GiB"),
        (3.456 * GIB, "3.46 GiB"),
    ],
)
def test_a_size_below_a_tenth_of_a_gib_is_in_mib(size, text):
    assert gib(size) == text
    assert gib_cell(size) == text.removesuffix(" GiB")
