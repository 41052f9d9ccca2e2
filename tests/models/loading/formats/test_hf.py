"""Tiny random models of every variant against transformers, in float32."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import CheckpointWarning, UsageError
from specjax.models import load
from specjax.models.loading.formats import hf

TOLERANCE = 1e-4

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 2.0, "original_max_position_embeddings": 16,
}  # fmt: skip
WHOLE_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}  # its original length is that of the config
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 3.0, 6.0],
    "partial_rotary_factor": 0.75,
}  # fmt: skip
LOCAL_THEN_GLOBAL = ["sliding_attention", "full_attention"]

VARIANTS = {
    "llama-tied": dict(kind="llama", tie_word_embeddings=True),
    "llama-untied-yarn": dict(kind="llama", tie_word_embeddings=False, head_dim=16, rope_parameters=YARN),
    "llama-yarn-of-the-whole-length": dict(kind="llama", rope_parameters=WHOLE_YARN),
    "llama-linear": dict(kind="llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}),
    "llama-llama3": dict(kind="llama", rope_parameters=LLAMA3),
    "mistral": dict(kind="mistral", sliding_window=5),
    "qwen2": dict(kind="qwen2"),
    "qwen3": dict(kind="qwen3", tie_word_embeddings=True),
    "gemma3": dict(kind="gemma3_text", sliding_window=5, query_pre_attn_scalar=24, layer_types=LOCAL_THEN_GLOBAL),
    "qwen2-some-windows": dict(kind="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "ministral": dict(kind="ministral", sliding_window=5, layer_types=LOCAL_THEN_GLOBAL, head_dim=16),
    "phi3": dict(kind="phi3", pad_token_id=0, sliding_window=7, tie_word_embeddings=True),
    "phi4-mini": dict(
        kind="phi3", pad_token_id=0, rope_parameters=LONGROPE, original_max_position_embeddings=10,
    ),
    "olmo2": dict(kind="olmo2", rope_parameters=YARN),
    "olmo3": dict(
        kind="olmo3", sliding_window=5, layer_types=LOCAL_THEN_GLOBAL,
        rope_parameters={
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "gemma2": dict(
        kind="gemma2", sliding_window=5, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tiny, texts, tmp_path_factory):
    """Return (folder, logits, hidden states) of one variant."""
    model = tiny.model(**VARIANTS[request.param])
    folder = tiny.save(model, tmp_path_factory.mktemp(request.param))
    return folder, *tiny.reference(model, texts)


def difference(ours, theirs) -> float:
    return max(float(np.max(np.abs(a - b))) for a, b in zip(ours, theirs, strict=True))


def check(target, variant, cut, tiny, texts) -> None:
    _, logits, hidden = variant
    assert np.std(logits[0]) > 0.3, "the reference must not be flat"
    got, taps, last = tiny.ours(target, texts, cut, taps=(0, 1))
    assert difference(got, logits) <= TOLERANCE
    for row in range(2):
        assert difference([*taps[row], last[row]], hidden[row]) <= TOLERANCE * 10  # the stream is larger than logits


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
def test_two_ragged_pieces_equal_transformers(variant, stacked, tiny, texts):
    """Logits, taps and hidden states agree, with the first 9 and 5 tokens read back from the cache."""
    target, _ = load(variant[0], stacked=stacked)
    check(target, variant, (9, 5), tiny, texts)


def test_one_piece_equals_transformers(variant, tiny, texts):
    target, _ = load(variant[0])
    check(target, variant, (0, 0), tiny, texts)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_the_window_matters(kind, tiny, texts, tmp_path):
    """This guards the tests above: without the window the same weights give other logits."""
    folder = tiny.save(tiny.model(kind, num_hidden_layers=1, sliding_window=5), tmp_path)
    narrow, _ = load(folder)
    rewrite(folder, lambda c: c.update(sliding_window=64))
    wide, _ = load(folder)
    a, b = (tiny.ours(target, texts)[0][0] for target in (narrow, wide))
    assert difference([a[:5]], [b[:5]]) <= TOLERANCE
    assert difference([a[5:]], [b[5:]]) > 0.1


def rewrite(folder, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def old_form(config: dict) -> None:
    """Return the rope settings in the form of transformers 4."""
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope


def test_old_and_new_rope_settings_agree(variant):
    folder = variant[0]
    original = (folder / "config.json").read_text()
    new = hf.read(folder).config
    try:
        rewrite(folder, old_form)
        assert "rope_parameters" not in (folder / "config.json").read_text()
        assert hf.read(folder).config == new
    finally:
        (folder / "config.json").write_text(original)


def test_default_gemma_pattern_is_five_local_one_global(tiny, tmp_path):
    folder = tiny.save(tiny.model("gemma3_text", num_hidden_layers=7), tmp_path)
    config = hf.read(folder).config
    rewrite(folder, lambda c: c.pop("layer_types"))
    assert hf.read(folder).config == config
    assert config.is_global == (False,) * 5 + (True, False)
    assert (config.rope_base, config.local_rope_base) == (1_000_000.0, 10_000.0)


def test_text_part_of_a_multimodal_gemma(tiny, tmp_path):
    """The names get a prefix, the settings a level; vision tensors are ignored."""
    from safetensors.numpy import load_file, save_file

    folder = tiny.save(tiny.model("gemma3_text"), tmp_path)
    plain, _ = load(folder)
    tensors = {f"language_model.{name}": t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.x.weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    both, _ = load(folder)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), plain.params, both.params))


def test_text_part_of_mistral_small(tiny, texts, tmp_path):
    """It has a vision tower, under the names of published files and under those within transformers."""
    transformers = pytest.importorskip("transformers")
    from safetensors.numpy import load_file, save_file

    small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    text = small | dict(vocab_size=tiny.vocab, num_key_value_heads=1, head_dim=16, max_position_embeddings=128)
    config = transformers.Mistral3Config(
        text_config=text | {"model_type": "mistral", "tie_word_embeddings": False},
        vision_config=small | {"model_type": "pixtral"},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = tiny.loud(transformers.AutoModelForImageTextToText.from_config(config))
    folder = tiny.save(model, tmp_path)
    written = load_file(folder / "model.safetensors")
    assert any("vision_tower" in name for name in written)
    logits, _ = tiny.reference(model, texts)
    target, _ = load(folder)
    assert difference(tiny.ours(target, texts)[0], logits) <= TOLERANCE

    def new(name: str) -> str:
        name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm")
        return name if name.startswith(("model.", "lm_head")) else f"model.{name}"

    save_file({new(name): x for name, x in written.items()}, folder / "model.safetensors")
    again, _ = load(folder)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again.params, target.params))


def test_longrope_of_a_model_of_short_texts(tiny, texts, tmp_path):
    """transformers uses the short factors up to the original length; a model of that length uses them for all texts."""
    model = tiny.model("phi3", pad_token_id=0, rope_parameters=LONGROPE, original_max_position_embeddings=64)
    folder = tiny.save(model, tmp_path)
    logits, _ = tiny.reference(model, texts)
    short, _ = load(folder, max_positions=64)
    assert difference(tiny.ours(short, texts)[0], logits) <= TOLERANCE
    long, _ = load(folder)
    assert difference(tiny.ours(long, texts)[0], logits) > 0.1
    with pytest.raises(UsageError, match="max_positions must be from 1 to 128"):
        load(folder, max_positions=129)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints(kind, dtype, tiny, texts, tmp_path):
    import torch
    import transformers

    folder = tiny.save(tiny.model(kind, num_hidden_layers=1).to(getattr(torch, dtype)), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target, _ = load(folder)
    logits, _ = tiny.reference(model, texts)
    assert difference(tiny.ours(target, texts)[0], logits) <= TOLERANCE


@pytest.mark.parametrize("stacked", [False, True])
def test_bfloat16_parameters_are_the_rounded_float32_ones(stacked, tiny, tmp_path):
    folder = tiny.save(tiny.model("gemma3_text"), tmp_path)
    full, half = (load(folder, dtype=dtype, stacked=stacked)[0] for dtype in ("float32", "bfloat16"))
    same = jax.tree.map(lambda a, b: bool((a.astype(jnp.bfloat16) == b).all()), full.params, half.params)
    assert jax.tree.all(same)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype("bfloat16")}


def test_shards(tiny, tmp_path):
    model = tiny.model("llama", tie_word_embeddings=False)
    full, _ = load(tiny.save(model, tmp_path / "whole"))
    folder = tiny.save(model, tmp_path / "shards", max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    split, _ = load(folder)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), full.params, split.params))
    shards[1].unlink()
    with pytest.raises(UsageError, match=rf"lacks 1 of its {len(shards)} shards, first {shards[1].name}"):
        load(folder)


def test_truncated_safetensors(tiny, tmp_path):
    folder = tiny.save(tiny.model("llama"), tmp_path)
    file = folder / "model.safetensors"
    contents = file.read_bytes()
    for size in (len(contents) * 3 // 4, 100, 4, 0):
        file.write_bytes(contents[:size])
        with pytest.raises(UsageError, match=r"model.safetensors is not a whole safetensors file: cut short"):
            load(folder)


UNSUPPORTED = {
    "rope type": ("llama", dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}), '"dynamic"'),
    "half of longrope": (
        "llama",
        dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4}),
        "lacks the field rope_parameters.long_factor",
    ),
    "too few divisors": (
        "llama",
        dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3}),
        "rope_parameters.short_factor .* must be a list of 4",
    ),
    "mscale": ("phi3", dict(rope_parameters=LONGROPE | {"long_mscale": 1.2}), "rope_parameters.long_mscale"),
    "partial": ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "odd part": (
        "phi3",
        dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.4}),
        "partial_rotary_factor 0.4, which rotates 3 of the 8",
    ),
    "layer type": ("qwen3", dict(layer_types=["full_attention", "linear_attention"]), '"linear_attention"'),
    "types of other layers": (
        "olmo3",
        dict(layer_types=["full_attention"]),
        "has 1 layer_types, but num_hidden_layers",
    ),
    "text part": (
        "mistral",
        dict(model_type="mistral3", architectures=[], text_config={"model_type": "ministral3"}),
        '"ministral3"',
    ),
    "yarn of one frequency": (
        "llama",
        dict(rope_parameters=YARN | {"rope_theta": 1.0}),
        "has rope_theta 1, which YaRN",
    ),
    "architecture": ("llama", dict(model_type="gpt_j_oss"), '"gpt_j_oss"'),
    "bias": ("llama", dict(attention_bias=True), "attention_bias"),
    "activation": ("llama", dict(hidden_act="gelu"), '"gelu"'),
    "missing field": ("llama", dict(hidden_size=None), "lacks the field hidden_size"),
    "quantised": ("llama", dict(quantization_config={"quant_method": "quark"}), 'quantised by the method "quark"'),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_configurations_are_refused_by_name(name, tiny, tmp_path):
    kind, change, message = UNSUPPORTED[name]
    folder = tiny.save(tiny.model(kind, pad_token_id=0), tmp_path)
    hf.read(folder)
    rewrite(folder, lambda c: c.update(change))
    with pytest.raises(UsageError, match=message):
        hf.read(folder)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_tied_config_with_another_head_in_the_file(kind, tiny, texts, tmp_path):
    """The matrix of the file counts, as in transformers; a copy of the embedding is no other matrix."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = tiny.save(tiny.model(kind, tie_word_embeddings=True), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone()}, file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(folder)[0].model.config.tied
    save_file(tensors | {"lm_head.weight": torch.randn(table.shape, generator=torch.Generator().manual_seed(5))}, file)
    with pytest.warns(CheckpointWarning, match=r"ties the output layer .* but its lm_head.weight is another matrix"):
        target, _ = load(folder)
    expected, _ = tiny.reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), texts)
    assert difference(tiny.ours(target, texts)[0], expected) <= TOLERANCE


def test_a_tied_table_under_the_name_of_the_head(tiny, tmp_path):
    """safetensors' `save_model` keeps one of two names."""
    from safetensors.torch import load_file, save_file

    folder = tiny.save(tiny.model("llama", tie_word_embeddings=True), tmp_path)
    expected, _ = load(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    loaded, _ = load(folder)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), expected.params, loaded.params))


def test_an_index_beside_a_whole_file_is_refused(tiny, tmp_path):
    folder = tiny.save(tiny.model("llama"), tmp_path, max_shard_size="20KB")
    single = folder / "model.safetensors"
    load(folder)
    single.write_bytes((sorted(folder.glob("model-0*"))[0]).read_bytes())
    with pytest.raises(UsageError, match=r"has model.safetensors, and model.safetensors.index.json names other files"):
        load(folder)
    single.unlink()
    (folder / "consolidated.safetensors").write_bytes(b"of another library")
    load(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4976698672\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_pointer_of_git_lfs_is_named(name, tiny, tmp_path):
    folder = tiny.save(tiny.model("llama"), tmp_path)
    (folder / "picture.png").write_bytes(POINTER)  # no loader opens it
    load(folder)
    (folder / name).write_bytes(POINTER)
    with pytest.raises(UsageError, match=rf"{name} is a Git LFS pointer, not the file itself; run git lfs pull"):
        load(folder)


@pytest.mark.parametrize("suffix", ["gguf", "bin"])
def test_a_pointer_as_a_single_file_is_named(suffix, tmp_path):
    (tmp_path / f"x.{suffix}").write_bytes(POINTER)
    with pytest.raises(UsageError, match=rf"x.{suffix} is a Git LFS pointer"):
        load(tmp_path / f"x.{suffix}")


def test_an_adapter_is_named(tiny, tmp_path):
    folder = tiny.save(tiny.model("llama"), tmp_path)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.warns(CheckpointWarning, match="has an adapter beside the model, which is not applied"):
        load(folder)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="has an adapter, not a model; merge it into its base model"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match="has an adapter, not a model; merge it into its base model"):
        load(folder)


def test_a_folder_of_gguf_files_is_named(tiny, tmp_path):
    folder = tiny.save(tiny.model("llama"), tmp_path)
    (folder / "model.safetensors").rename(folder / "a.gguf")
    with pytest.raises(
        UsageError, match=r"has GGUF files and no \*.safetensors; give one of the files, such as .*a.gguf"
    ):
        load(folder)
