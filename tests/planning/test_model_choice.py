"""The choice of a model for the device of this process."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from specjax.errors import UsageError
from specjax.planning import choose_model, model_choice
from specjax.planning.inputs.model_configs import builtin_configs, hub_id

CANDIDATES = ("llama3_8b", "qwen2_5_coder_1_5b", "smollm2_135m")


@pytest.fixture
def on_device(monkeypatch):
    """Replace JAX's device by one of a kind, with a limit of memory or without one."""

    def replace(kind, platform, limit=None):
        stats = None if limit is None else {"bytes_limit": limit}
        device = SimpleNamespace(device_kind=kind, platform=platform, memory_stats=lambda: stats)
        monkeypatch.setattr(model_choice, "jax", SimpleNamespace(devices=lambda: [device]))

    return replace


@pytest.mark.parametrize(
    ("kind", "platform", "limit", "source", "dtype"),
    [
        ("TPU v5 lite", "tpu", None, "Qwen/Qwen2.5-Coder-1.5B-Instruct", "float32"),
        ("TPU v5 lite", "tpu", 5 << 30, "Qwen/Qwen2.5-Coder-1.5B-Instruct", "bfloat16"),
        ("TPU v5 lite", "tpu", 2 << 30, "smollm2-135m", "float32"),
        ("TPU v6 lite", "tpu", None, "meta-llama/Llama-3.1-8B", "bfloat16"),
        ("NVIDIA H200", "gpu", None, "meta-llama/Llama-3.1-8B", "float32"),
        ("Tesla T4", "gpu", 11 << 30, "Qwen/Qwen2.5-Coder-1.5B-Instruct", "float32"),
    ],
)
def test_the_first_model_that_fits(on_device, kind, platform, limit, source, dtype):
    on_device(kind, platform, limit)
    choice = choose_model(CANDIDATES if "Llama" in source else CANDIDATES[1:])
    assert (choice.source, choice.dtype) == (source, dtype)
    assert choice.fit.weights_bytes < choice.fit.needed_bytes and choice.fit.num_nodes > 1
    assert (
        kind in choice.sentence and source in choice.sentence and f"{choice.fit.largest_context:,}" in choice.sentence
    )


def test_a_cpu_gets_the_smallest_model():
    assert jax.default_backend() == "cpu"
    choice = choose_model(CANDIDATES)
    assert (choice.source, choice.dtype, choice.fit) == ("smollm2-135m", "float32", None)


def test_a_device_of_unknown_memory_gets_the_smallest_model(on_device):
    """The figures of another chip would be a guess."""
    on_device("Some GPU", "gpu")
    choice = choose_model(CANDIDATES, dtypes="bfloat16")
    assert (choice.source, choice.dtype, choice.fit) == ("smollm2-135m", "bfloat16", None)
    assert "the memory of this Some GPU is unknown" in choice.sentence


@pytest.mark.parametrize("kind", [("cpu", "cpu"), ("TPU v5 lite", "tpu")])
def test_a_choice_needs_names(on_device, kind):
    on_device(*kind)
    for targets, dtypes in (((), ("float32",)), (("smollm2_135m",), ())):
        with pytest.raises(UsageError, match="a choice needs a target and a dtype, not targets"):
            choose_model(targets, dtypes=dtypes)
    assert choose_model("smollm2_135m").source == "smollm2-135m"


def test_nothing_fits(on_device):
    on_device("TPU v5 lite", "tpu", 1 << 27)
    with pytest.raises(UsageError, match=r"none of smollm2_135m fits on a TPU v5 lite with 0\.12 GiB"):
        choose_model(["smollm2_135m"])


def test_every_built_in_config_has_a_hub_id():
    for name in builtin_configs():
        assert hub_id(name).count("/") == 1
    with pytest.raises(UsageError, match='"nothing" is not a built-in config'):
        hub_id("nothing")
