"""Defaults of sampling of a model's folder."""

import json

import pytest

from specjax import UsageError
from specjax.cli.commands.serve import ServeSampling
from specjax.cli.runs.generation_config import with_recommended


def recommended(folder, contents, **flags):
    (folder / "generation_config.json").write_text(json.dumps(contents))
    sampling = with_recommended(ServeSampling(**flags), folder, 1.0)
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def test_values_of_the_file_are_defaults_of_flags(tmp_path):
    contents = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "do_sample": True}
    assert recommended(tmp_path, contents) == (0.6, 20, 0.95, None)
    assert recommended(tmp_path, contents, temperature=0.0, top_k=5) == (0.0, 5, 0.95, None)
    assert recommended(tmp_path, {"top_k": 0, "min_p": 0.1}) == (1.0, None, None, 0.1)
    assert with_recommended(ServeSampling(), None, 1.0).temperature == 1.0


@pytest.mark.parametrize("contents", [{"temperature": "hot"}, {"top_k": 1.5}, {"top_p": 2}, {"min_p": True}])
def test_wrong_values_are_named(tmp_path, contents):
    name = next(iter(contents))
    with pytest.raises(UsageError, match=rf"generation_config.json has {name} .*; correct it, or start with"):
        recommended(tmp_path, contents)
