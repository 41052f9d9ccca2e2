"""The planner with the real CUDA compiler: what a step on an H200 launches, copies and waits for."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import gpu
import pytest
from tiers import exhaustive

pytestmark = pytest.mark.gpu_compile

MODELS = ("smollm2_135m", "llama3_8b")
TINY = {
    "vocab_size": 2048, "width": 256, "num_layers": 3, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64,
    "mlp_width": 512, "max_positions": 4096,
}  # fmt: skip
EASY = {"name": "llama3_1b", "num_layers": 4, "vocab_size": 128256}


@functools.cache
def shallow(model: str) -> tuple[dict, dict]:
    """A step of the model with two and with three layers; what they differ by is a layer."""
    several = gpu.reports(*(gpu.request({"name": model, "num_layers": n}, context=100) for n in (2, 3)))
    return several[0]["step"], several[1]["step"]


def per_layer(model: str, count) -> float:
    two, three = shallow(model)
    return count(three) - count(two)


def unknown_loops(step: dict) -> float:
    return sum(loop["executions"] for loop in step["loops"] if not loop["known"])


def moved_parameters(step: dict) -> list[str]:
    return [finding["sentence"] for finding in step["findings"] if finding["kind"] in ("copy", "slice")]


@pytest.mark.parametrize("model", MODELS)
def test_a_step_copies_and_slices_no_parameter(model):
    """It moves little more than the weights and the cache, and needs little memory beside them."""
    _, step = shallow(model)
    assert not moved_parameters(step)
    assert step["must_bytes"] <= step["moved_bytes"] < 1.05 * step["must_bytes"]
    assert step["memory"]["temporaries"] < 1 << 20, step["memory"]
    assert step["memory"]["aliased"] > 0.99 * step["memory"]["output"], "the cache is written in place"


@pytest.mark.parametrize("model", MODELS)
def test_no_loop_in_a_layer_has_an_unknown_length(model):
    assert per_layer(model, unknown_loops) == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_has_few_kernels_beside_products_and_attention(model):
    assert per_layer(model, lambda step: step["kernels"]["other"]) <= 10


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_has_few_products(model):
    """qkv, o, gate_up and down. The report counts three for SmolLM2: one of its products is no matmul kernel."""
    assert 3 <= per_layer(model, lambda step: step["kernels"]["products"]) <= 7


@pytest.mark.parametrize("model", [exhaustive(model) for model in MODELS])
def test_complete_models(model):
    """Complete models compile as the shallow ones do, and their layers are alike."""
    (answer,) = gpu.reports(gpu.request(model, context=1024))
    step, two = answer["step"], shallow(model)[0]
    assert not moved_parameters(step)
    assert step["memory"]["temporaries"] < 4 << 20, step["memory"]
    assert step["must_bytes"] <= step["moved_bytes"] < 1.02 * step["must_bytes"]
    layers = {"smollm2_135m": 30, "llama3_8b": 32}[model]
    each = lambda count: (count(step) - count(two)) / (layers - 2)
    kernels = lambda report: sum(report["kernels"].values())
    assert each(kernels) == pytest.approx(per_layer(model, kernels), rel=0.1)
    assert each(unknown_loops) == per_layer(model, unknown_loops)


@functools.cache
def on_meshes() -> dict[str, dict]:
    """Tensor parallel, with split rows, and a draft model with two layers at a time."""
    two = {"name": "llama3_8b", "num_layers": 2}
    options = {"context": 256, "max_new_tokens": 32}
    requests = {
        "model": gpu.request(two, "h200:8", **options),
        "data": gpu.request(two, "h100:8", data=2, batch=2, **options),
        "easyspec": gpu.request(two, "h200:8", draft=EASY, method="easyspec", layer=2, num_draft_tokens=2, **options),
    }
    return dict(zip(requests, gpu.reports(*requests.values()), strict=True))


@pytest.mark.parametrize("mesh", ["model", "data", "easyspec"])
def test_several_gpus(mesh):
    """No device receives weights or logits of another, and none needs much memory beside its part."""
    step = on_meshes()[mesh]["step"]
    assert step["compiles"], step["reason"]
    sums = [entry for entry in step["collectives"] if entry["kind"] == "all-reduce"]
    assert sum(entry["count"] for entry in sums) >= 2 * 2
    assert {entry["group"] for entry in step["collectives"]} <= {2, 4, 8}
    assert sum(entry["wire_bytes"] for entry in step["collectives"]) < 2 << 20, step["collectives"]
    limit = 128 if mesh == "easyspec" else 16  # its products are library calls, which have a workspace
    assert step["memory"]["temporaries"] < limit << 20, step["memory"]
    assert 0 < step["seconds"]["collectives"] < step["seconds"]["roofline"] < step["seconds"]["schedule"]


def test_what_does_not_fit_is_a_result():
    """The CUDA compiler compiles programs that are too large."""
    wide = {"num_layers": 2, "width": 16384, "mlp_width": 1 << 20, "num_heads": 128, "num_kv_heads": 8, "head_dim": 128,
            "vocab_size": 2048}  # fmt: skip
    one, two = gpu.reports(*(gpu.request(wide, f"h200:{n}", context=64, max_new_tokens=16) for n in (1, 2)))
    assert not one["step"]["compiles"] and one["step"]["needed_bytes"] > 150e9
    assert "GiB of HBM and a h200 device has 139.80 GiB" in one["step"]["reason"]
    assert two["step"]["compiles"]


def test_a_plan_for_a_gpu():
    """The mesh is the fastest of two, wide passes cost little, and both estimates propose a tree."""
    options = {"acceptance": [0.6, 0.2], "widths": [1, 8], "context": 256, "max_new_tokens": 32}
    (plan,) = gpu.reports(gpu.request({"name": "llama3_8b", "num_layers": 2}, "h200:2", kind="plan", **options))
    alone, both = plan["meshes"]
    assert (alone["name"], both["name"]) == ("model 1", "model 2")
    fastest = 1 + (both["seconds"]["schedule"] < alone["seconds"]["schedule"])
    assert plan["inputs"]["model"] == fastest
    assert [report["name"] for report in plan["widths"]] == ["verify 1", "verify 8"]
    assert {choice["side"] for choice in plan["choices"]} == {"schedule", "roofline"}
    assert all(choice["num_nodes"] == 8 and choice["speedup"] > 1.2 for choice in plan["choices"])
    one, eight = (report["seconds"]["roofline"] for report in plan["widths"])
    assert one < eight < 1.1 * one
    assert "kernels" in plan["clocks"]["schedule"]


def test_the_command_line(tmp_path):
    """The tables of all three programs, with kernels and loops."""
    gpu.need_compiler()
    pytest.importorskip("prompt_toolkit", reason="the command line is not installed (pip install 'specjax[cli]')")
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    arguments = ["compile", "--target", str(tmp_path), "--topology", "h100:1", "--context", "64", "--no-cache"]
    done = subprocess.run(
        [sys.executable, "-m", "specjax.cli", *arguments, "--max-new-tokens", "16"], capture_output=True, text=True,
        cwd=tmp_path, env={name: value for name, value in gpu.ENVIRONMENT.items() if name != "JAX_PLATFORMS"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    words = " ".join(done.stdout.split())
    for part in ("h100:1, one device", "kernels products attention others", "prefill", "step", "loop", "of 79.11 GiB"):
        assert part in words, done.stdout
