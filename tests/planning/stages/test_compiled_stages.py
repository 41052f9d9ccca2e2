"""The two stages as programs of their own, and the TPU compiler's figures of them."""

from __future__ import annotations

import pytest
import tpu
from tiers import exhaustive
from toy import tiny_llama

from specjax.errors import UsageError
from specjax.models import LlamaConfig, abstract_params
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.storage import num_bytes, quantized_config
from specjax.planning.inputs.model_configs import load_config, num_params
from specjax.planning.stages import compile_stages
from specjax.planning.stages.parts import parts_of
from specjax.planning.stages.programs import VOCAB, stage_configs


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b", "gpt_oss_20b", "qwen3_next_80b", "deepseek_v2_lite"])
def test_the_stages_have_the_parameters_of_the_model(name):
    config = load_config(name, "bfloat16")
    parts, stages = parts_of(config, 1024), stage_configs(config)
    outer = (VOCAB + 1) * config.width  # the embedding and the last norm
    attention, feed = (num_params(stage) - outer for stage in stages)
    assert attention == parts.attention.params
    assert feed == parts.feed.params + parts.experts.params
    paths = [str(abstract_params(stage)["layers"]) for stage in stages]
    assert "mlp" not in paths[0] and "attention" not in paths[1] and "recurrent" not in paths[1]
    assert parts_of(stages[0], 1024).context == parts.context, "windows are those of the model"


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("qwen3_30b_a3b", "int8"), ("gpt_oss_20b", "int4-weights"), ("qwen3_next_80b", "int8-weights"),
        ("deepseek_v2_lite", "fp8"),
    ],
)  # fmt: skip
def test_the_stages_of_a_quantised_mixture_have_its_bytes(name, scheme):
    plain = load_config(name, "bfloat16")
    config = quantized_config(plain, scheme, "tpu")
    parts = parts_of(config, 1024)
    layers = [num_bytes(abstract_params(stage)["layers"]) for stage in stage_configs(config)]
    assert layers == [parts.attention.bytes, parts.feed.bytes + parts.experts.bytes]
    bits = 4 if scheme == "int4-weights" else 8
    share = parts.experts.bytes / parts_of(plain, 1024).experts.bytes
    assert bits / 16 < share < bits / 16 + 0.04, "values, and scales besides"


def test_options_are_checked():
    with pytest.raises(UsageError, match="nodes must be a number from 1 to 512, not 0"):
        compile_stages("llama3_8b", "v5e:2x2", nodes=0)
    with pytest.raises(UsageError, match="diffusion model"):
        compile_stages("llada_8b", "v5e:2x2")


@pytest.mark.tpu_compile
@pytest.mark.parametrize("scheme", ["int8", exhaustive("int4-weights")])
def test_stages_of_a_quantised_mixture_compile(scheme):
    """The schedule reads at least the attention weights, and the experts that rows are expected to choose."""
    tpu.devices()
    sizes = MixtureSizes(16, 256, Routing(2, normalized=True))
    config = LlamaConfig(
        vocab_size=512, width=512, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=128, mlp_width=512,
        experts=sizes, stacked=True, dtype="bfloat16", name="small",
    )  # fmt: skip
    options = {"nodes": 2, "batch": 4, "context": 256, "max_new_tokens": 8, "cache": False}
    stages = compile_stages(config, "v5e:2x2", quantize=scheme, **options)
    parts = parts_of(quantized_config(config, scheme, "tpu"), 256)
    needed = parts.attention.bytes, parts.feed.bytes + parts.touched(8) * parts.experts.bytes
    for report, bytes_of_part in zip(stages, needed, strict=True):
        assert report.compiles and not report.collectives
        assert report.moved_bytes > bytes_of_part and report.seconds["schedule"] > 0


@pytest.mark.tpu_compile
def test_the_compiler_reads_the_bytes_of_the_formulas():
    tpu.devices()
    config = tiny_llama().model.config
    stages = compile_stages(config, "v5e:2x2", nodes=4, batch=2, context=256, max_new_tokens=8, cache=False)
    assert (stages.attention.name, stages.feed.name) == ("attention", "feed")
    for report, part in zip(stages, (parts_of(config, 256).attention, parts_of(config, 256).feed), strict=True):
        assert report.compiles and report.must_bytes > part.bytes and report.seconds["schedule"] > 0
        assert not report.collectives
