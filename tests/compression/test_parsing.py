"""The row of each compression, and compressions by text."""

import inspect

import pytest

from specjax import UsageError, compression
from specjax.catalog import of_kind
from specjax.compression import parse_compression


@pytest.mark.parametrize("name", of_kind("compression"))
def test_options_and_defaults_are_those_of_the_function(name):
    row = of_kind("compression")[name]
    for function in (row.make, row.load_check()):
        defaults = {
            parameter.name: parameter.default
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is not parameter.empty
        }
        assert {option.name: option.default for option in row.options} == defaults
    assert row.guarantee == "lossy" and row.make is getattr(compression, name)


def test_texts():
    assert parse_compression("specpc").options == {}
    assert parse_compression("specpc:512").options == {"budget": 512}
    read = parse_compression("specpc:512,window=32,draft=small")
    assert read.options == {"budget": 512, "window": 32} and read.draft == "small" and read.method == "specpc"
    read = parse_compression("speckv:256,lookahead=8")
    assert (
        read.options == {"capacity": 256, "lookahead": 8}
        and read.is_of_cache
        and not parse_compression("specpc").is_of_cache
    )
    for text, words in (
        ("auto", '"auto" is not a method that compresses prompts; choose one of speckv, specpc'),
        ("specpc:0", "budget must be a whole number of at least 1, not 0"),
        ("specpc:few", 'budget must be a whole number, not "few"'),
        ("specpc:64", "budget must be above 68"),
        ("specpc:512,depth=3", "specpc takes budget=N, window=N"),
        ("speckv:32", "capacity must be above 32, the last tokens that always stay, not 32; raise capacity"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_compression(text)
