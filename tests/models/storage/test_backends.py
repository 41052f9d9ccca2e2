"""The form in which models are stored on each backend."""

import jax
import pytest

from specjax.models import loading, storage_options


@pytest.mark.parametrize(
    ("platform", "stacked", "joined"), [("cpu", False, ()), ("gpu", False, ("qkv", "gate_up")), ("tpu", True, ("qkv",))]
)
def test_a_loaded_model_has_the_form_of_its_backend_unless_another_is_requested(
    platform, stacked, joined, data, monkeypatch
):
    source = data / "stories260K" / "stories260K.bin"
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    config = loading.read_model(source).target.model.config
    assert (config.stacked, config.joined) == (stacked, joined)
    assert {name: getattr(config, name) for name in storage_options(platform)} == storage_options(platform)
    config = loading.read_model(source, stacked=not stacked, joined=not joined).target.model.config
    assert (config.stacked, config.joined) == (not stacked, () if joined else ("qkv", "gate_up"))
