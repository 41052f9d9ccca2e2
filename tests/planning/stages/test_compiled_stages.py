"""The two stages as programs of their own, and the TPU compiler's figures of them."""

from __future__ import annotations

import pytest
import tpu
from toy import tiny_llama

from specjax.errors import UsageError
from specjax.models import abstract_params
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


def test_options_are_checked():
    with pytest.raises(UsageError, match="nodes must be a number from 1 to 512, not 0"):
        compile_stages("llama3_8b", "v5e:2x2", nodes=0)
    with pytest.raises(UsageError, match="diffusion model"):
        compile_stages("llada_8b", "v5e:2x2")


@pytest.mark.tpu_compile
def test_the_compiler_reads_the_bytes_of_the_formulas():
    tpu.devices()
    config = tiny_llama().model.config
    stages = compile_stages(config, "v5e:2x2", nodes=4, batch=2, context=256, max_new_tokens=8, cache=False)
    assert (stages.attention.name, stages.feed.name) == ("attention", "feed")
    for report, part in zip(stages, (parts_of(config, 256).attention, parts_of(config, 256).feed), strict=True):
        assert report.compiles and report.must_bytes > part.bytes and report.seconds["schedule"] > 0
        assert not report.collectives
