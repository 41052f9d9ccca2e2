"""The two stages as programs of their own, and the TPU compiler's figures of them."""

from __future__ import annotations

import io
import json

import pytest
import tpu
from rich.console import Console
from tiers import exhaustive
from toy import tiny_llama

from specjax.cli import main
from specjax.costs.chips import CHIPS
from specjax.costs.experts import busiest_experts
from specjax.errors import UsageError
from specjax.models import LlamaConfig, abstract_params
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.storage import num_bytes, quantized_config
from specjax.planning import workload
from specjax.planning.inputs.model_configs import load_config, num_params
from specjax.planning.records import MemoryUse, ProgramReport
from specjax.planning.stages import CompiledStages, StagePass, compile_stages
from specjax.planning.stages.parts import parts_of
from specjax.planning.stages.pipeline import feed_seconds
from specjax.planning.stages.programs import VOCAB, stage_configs
from specjax.planning.stages.table import show_compiled_stages


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
def test_the_command_compiles_stages_for_several_devices(capsys, monkeypatch):
    """Two feed-forward devices have half of the experts each, and one sum per layer. Attention has half of the rows."""
    tpu.devices()
    sizes = MixtureSizes(16, 256, Routing(2, normalized=True))
    config = LlamaConfig(
        vocab_size=512, width=512, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=128, mlp_width=512,
        experts=sizes, stacked=True, dtype="bfloat16", name="small",
    )  # fmt: skip
    monkeypatch.setattr(workload, "load_config", lambda *options: config)
    monkeypatch.setattr(workload, "load_denoiser_settings", lambda source: None)
    flags = ["--batch-size", "4", "--context", "256", "--max-new-tokens", "8", "--no-cache", "--widths", "1"]
    with pytest.raises(SystemExit) as stop:
        main(["compile", "--stages", "2:2", "--target", "llama3_8b", "--topology", "v5e:2x2", *flags, "--json"])
    assert stop.value.code == 0
    result = json.loads(capsys.readouterr().out)
    [one] = result["passes"]
    parts = parts_of(config, 256)
    assert one["attention"]["compiles"] and not one["attention"]["collectives"]
    assert one["attention"]["moved_bytes"] > parts.attention.bytes
    busiest = busiest_experts(sizes, 4, 2)
    assert one["feed"]["assumed"]["experts"] == busiest
    assert one["feed"]["moved_bytes"] > parts.experts.bytes * busiest / 16
    assert one["feed"]["memory"]["arguments"] < parts.experts.bytes * 0.8
    assert {entry["kind"]: entry["count"] >= 4 for entry in one["feed"]["collectives"]}["all-reduce"]
    assert one["feed_formula"] == feed_seconds(parts, CHIPS["v5e"], 4) / 2
    assert (result["attention_devices"], result["experts"]) == (2, [16, 2])
    out = io.StringIO()
    report = ProgramReport(**{**one["feed"], "memory": MemoryUse(**one["feed"]["memory"])})
    refused = ProgramReport("attention", False, "it needs 9 GiB")
    passes = StagePass(1, one["attention_formula"], one["feed_formula"], refused, report)
    names = ("target", "topology", "attention_devices", "feed_devices", "batch", "context", "dtype", "experts")
    show_compiled_stages(CompiledStages(**{name: result[name] for name in names}, passes=(passes,)), Console(file=out))
    assert "attention, 1 nodes, does not compile: it needs 9 GiB" in out.getvalue() and "…" not in out.getvalue()


@pytest.mark.tpu_compile
def test_the_compiler_reads_the_bytes_of_the_formulas():
    tpu.devices()
    config = tiny_llama().model.config
    stages = compile_stages(config, "v5e:2x2", nodes=4, batch=2, context=256, max_new_tokens=8, cache=False)
    assert (stages.attention.name, stages.feed.name) == ("attention", "feed")
    for report, part in zip(stages, (parts_of(config, 256).attention, parts_of(config, 256).feed), strict=True):
        assert report.compiles and report.must_bytes > part.bytes and report.seconds["schedule"] > 0
        assert not report.collectives
