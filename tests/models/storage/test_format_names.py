"""Names of formats, as cards, configs and messages have them."""

import dataclasses

import pytest
from toy import tiny_llama

from specjax.models.storage import SCHEMES, stored_format
from specjax.models.storage.format_names import describe_formats
from specjax.numerics.quantized_array import FLOAT8, WeightFormat


def config_of(*rows):
    return dataclasses.replace(tiny_llama().model.config, quantized=rows)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_scheme_has_its_own_name_however_its_values_are_stored(platform):
    for name, form in SCHEMES.items():
        assert describe_formats(config_of(("*", stored_format(form, platform)))) == name


@pytest.mark.parametrize(("rows", "name"), [
    ((), None),
    ((("head", None),), None),
    ((("head", None), ("*", SCHEMES["int8"])), "int8"),
    ((("*.down", WeightFormat(6, group=16)), ("*", WeightFormat(4, group=32, has_offsets=True))),
     "6 bits in groups of 16, 4 bits in groups of 32 with offsets"),
    ((("*", WeightFormat(values=FLOAT8, inputs=FLOAT8)),), "float8_e4m3fn by float8_e4m3fn activations"),
])  # fmt: skip
def test_other_formats_are_described(rows, name):
    assert describe_formats(config_of(*rows)) == name
