"""A model that does not fit on the device is refused before its weights are read, with the scheme that fits."""

import dataclasses

import jax
import pytest
from written_models import VOCAB, words

import specjax
from specjax.errors import UsageError
from specjax.models import LlamaConfig, abstract_params, init_params, make_model
from specjax.models.loading import device_memory
from specjax.models.loading.device_memory import check_room
from specjax.models.storage import num_bytes

CONFIG = LlamaConfig(
    vocab_size=VOCAB, width=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, mlp_width=256,
    max_positions=64, name="small",
)  # fmt: skip
HALF = dataclasses.replace(CONFIG, dtype="bfloat16")


@pytest.fixture
def limit(monkeypatch):
    """Set the memory of the device, as a share of the size of the model in bfloat16."""
    half = num_bytes(abstract_params(HALF))
    return lambda share: monkeypatch.setattr(device_memory, "_memory_limit", lambda device: int(share * half))


@pytest.mark.parametrize(
    ("config", "share", "words"),
    [
        (HALF, 0.99, r'small needs \S+ MiB in bfloat16, and this .* has .*; it fits with quantize="int8" \(--quantize'),
        (HALF, 0.4, r'it fits with quantize="int8-weights"|it fits with quantize="int4-weights" \(--quantize int4-w'),
        (HALF, 0.1, r"no dtype or scheme fits, so split it over several devices with a mesh"),
        (CONFIG, 1.5, r'in float32, .*; it fits with dtype="bfloat16" \(--dtype bfloat16\)'),
        (CONFIG, 0.8, r'in float32, .*; it fits with quantize="int8"'),
    ],
)
def test_the_first_scheme_that_fits_is_named(config, share, words, limit, monkeypatch):
    stored = device_memory.quantized_config
    monkeypatch.setattr(device_memory, "quantized_config", lambda config, name, _: stored(config, name, "gpu"))
    limit(share)
    with pytest.raises(UsageError, match=words):
        check_room(config)


def test_a_model_that_fits_passes(limit):
    limit(1)
    check_room(HALF)
    check_room(dataclasses.replace(CONFIG, quantized=(("*", specjax.models.storage.SCHEMES["int8"]),)))
    with pytest.raises(UsageError, match="in float32"):
        check_room(CONFIG)


def test_a_mesh_shares_the_weights(limit):
    limit(0.6)
    check_room(HALF, specjax.mesh(1, 2))
    with pytest.raises(UsageError, match="it fits with"):
        check_room(HALF, specjax.mesh(2, 1))


def test_the_limit_of_a_cpu_is_unknown():
    assert device_memory._memory_limit(jax.devices()[0]) is None


def test_nothing_is_read_if_it_does_not_fit(limit, tmp_path, monkeypatch):
    specjax.save_model(tmp_path, specjax.Target(make_model(HALF), init_params(HALF, jax.random.key(0))), words())
    limit(0.9)
    monkeypatch.setattr("specjax.models.loading.assemble", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(UsageError, match=r'quantize="int8" \(--quantize int8\)'):
        specjax.load(tmp_path, dtype="bfloat16")
