"""Plans for models that read images."""

import dataclasses
import json

import jax
import pytest
import tpu
from image_heads import vision_target

from specjax import UsageError
from specjax.cli import main
from specjax.planning import compiler
from specjax.planning.abstract import abstract_job, shard_bytes
from specjax.planning.workload import describe, make_workload

CONFIG = dataclasses.replace(vision_target().model.config, dtype="bfloat16")
WORK = {"topology": "v5e:2x2", "context": 64, "max_new_tokens": 16, "batch": 2, "data": 2}


def test_images_are_arguments_of_the_programs():
    work = make_workload(CONFIG, **WORK, image_tiles=3)
    assert describe(work)["image_tiles"] == 3
    job = abstract_job(work, jax.devices()[:4]).job
    assert job.inputs.pixels.shape == (2, 3, 3, 24, 24) and job.inputs.places.shape == (2, 27)
    assert shard_bytes(job.inputs.pixels) == 4 * 3 * 3 * 24 * 24  # one of two rows
    assert abstract_job(make_workload(CONFIG, **WORK), jax.devices()[:4]).job.inputs is None


def test_a_step_does_not_read_the_tower(monkeypatch):
    monkeypatch.setattr(compiler, "describe_devices", lambda topology: jax.devices()[:4])
    with_images, without = (compiler.build(make_workload(CONFIG, **WORK, image_tiles=tiles))[1] for tiles in (3, 0))
    params = abstract_job(make_workload(CONFIG, **WORK), jax.devices()[:4]).job.parts.target.params
    tower = shard_bytes((params["tower"], params["connector"]))
    assert with_images["step"] == without["step"] < shard_bytes(params)
    assert with_images["prefill"] - without["prefill"] == tower > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_tiles": 8}, "--image-tiles 8 are 72 vectors, which leave no text in --context 64; raise --context"),
        ({"image_tiles": -1}, "--image-tiles must be at least 0, not -1"),
        ({"image_tiles": 1, "image_patches": 0}, "--image-patches must be at least 1, not 0"),
        ({"image_patches": 64}, "--image-patches 64 needs images; add --image-tiles, or leave it out"),
        ({"image_tiles": 1, "image_patches": 64}, "--image-patches 64: .* reads tiles of one size; leave it out"),
        ({"image_tiles": 1, "target": "smollm2_135m"}, "--image-tiles 1: smollm2-135m reads no images; leave it out"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        make_workload(**{"target": CONFIG} | WORK | options)


def test_a_folder_with_a_config_only_is_described(tmp_path, capsys):
    tower = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 96,
             "image_size": 64, "patch_size": 8}  # fmt: skip
    text = {"model_type": "llama", "vocab_size": 88, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
    config = {"model_type": "smolvlm", "text_config": text, "vision_config": tower, "scale_factor": 2,
              "image_token_id": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(tmp_path)])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "images: 16 vectors per tile of 64 x 64 pixels, by a tower of 2 layers with" in out
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["images"]["vectors"] == 16


@pytest.mark.tpu_compile
def test_prefill_reads_the_images_on_all_chips():
    """The tower multiplies on each chip for its own tiles, so a prefill with four tiles has the FLOPs of one more."""
    tpu.devices()
    flops = {}
    for tiles in (0, 1, 4):
        work = make_workload(CONFIG, "v5e:2x2", context=64, max_new_tokens=16, image_tiles=tiles)
        built, _ = compiler.build(work)
        flops[tiles] = built.programs[0].compiled().cost_analysis()["flops"]
    assert flops[0] < flops[1] and abs(flops[4] - flops[1]) < 0.2 * (flops[1] - flops[0])
