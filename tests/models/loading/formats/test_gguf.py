"""GGUF files, written here from tiny models, against the same model in transformers."""

import numpy as np
import pytest
from gguf_files import WORDS, write

from specjax.errors import CheckpointWarning, UsageError
from specjax.models import load
from specjax.models.loading.formats.gguf import read, read_header

gguf = pytest.importorskip("gguf")

CASES = {
    "llama": dict(kind="llama", tie_word_embeddings=False),
    "mistral": dict(kind="mistral", sliding_window=None),
    "qwen2": dict(kind="qwen2", tie_word_embeddings=True),
    "qwen3": dict(kind="qwen3"),
    "phi3": dict(kind="phi3", pad_token_id=0, sliding_window=None),
    "phi4-mini": dict(
        kind="phi3", pad_token_id=0, sliding_window=7, original_max_position_embeddings=10, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 3.0, 6.0],
        },
    ),
    "olmo2": dict(kind="olmo2"),
    "olmo3": dict(kind="olmo3", sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "gemma2": dict(
        kind="gemma2", sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": dict(
        kind="gemma3_text",
        sliding_window=5,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tiny, texts, tmp_path):
    model = tiny.model(**CASES[case])
    target, tokenizer = load(write(model, tmp_path / "model.gguf"))
    logits, _ = tiny.reference(model, texts)
    got, _, _ = tiny.ours(target, texts)
    assert max(np.max(np.abs(a - b)) for a, b in zip(got, logits, strict=True)) <= 1e-4
    assert tokenizer.vocab == tuple(WORDS) and tokenizer.eos == (2,)


def test_llama3_divisors(tiny, texts, tmp_path):
    """rope_freqs.weight alone determines the scaling; another pattern is refused."""
    from specjax.models.rotary import RopeScaling, rope_frequencies

    scaling = RopeScaling("llama3", 8.0)
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    model = tiny.model("llama", head_dim=16, rope_parameters=rope)
    divisors = np.asarray(rope_frequencies(16, 5e5) / rope_frequencies(16, 5e5, scaling))
    file = write(model, tmp_path / "model.gguf", scaling=divisors)
    assert read(file)[0].config.rope_scaling == scaling
    with pytest.raises(UsageError, match=r"rope_freqs.weight that differs from that of Llama 3"):
        read(write(model, tmp_path / "other.gguf", scaling=np.linspace(1, 8, 8, dtype=np.float32)))


def test_the_first_files_of_gemma2_have_the_window_that_all_have(tiny, tmp_path, monkeypatch):
    """llama.cpp's converter wrote neither window nor soft caps in June 2024; its reader has these numbers."""
    monkeypatch.setattr(gguf.GGUFWriter, "add_sliding_window", lambda *_: None)
    monkeypatch.setattr(gguf.GGUFWriter, "add_attn_logit_softcapping", lambda *_: None)
    monkeypatch.setattr(gguf.GGUFWriter, "add_final_logit_softcapping", lambda *_: None)
    config = read(write(tiny.model(**CASES["gemma2"]), tmp_path / "model.gguf"))[0].config
    assert (config.window, config.attention_softcap, config.logit_softcap) == (4096, 50.0, 30.0)
    with pytest.raises(UsageError, match=r"lacks the field gemma3.attention.sliding_window"):
        read(write(tiny.model(**CASES["gemma3"]), tmp_path / "model.gguf"))


def test_half_of_longrope_is_refused(tiny, tmp_path, monkeypatch):
    from specjax.models.loading.families import rope

    file = write(tiny.model(**CASES["phi4-mini"]), tmp_path / "model.gguf")
    config = read(file)[0].config
    assert config.rope_scaling.long == (1.5, 3.0, 6.0) and config.rotary_dim == 6
    monkeypatch.setattr(
        rope, "GGUF_DIVISORS", ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_none.weight")
    )
    with pytest.raises(UsageError, match=r"must have rope_factors_none.weight with 3 numbers .* the other set"):
        read(file)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("stacked", [False, True])
def test_stored_formats_equal_whole_tensor_dequantisation(kind, stacked, tiny, tmp_path):
    """Chunks, threads, permutation and stacking change no bit, compared with dequantising the whole tensor at once."""
    model = tiny.model("qwen2", hidden_size=64, intermediate_size=64, head_dim=16, vocab_size=96)
    file = write(model, tmp_path / "model.gguf", kind=kind)
    target, _ = load(file, stacked=stacked)
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(str(file)).tensors}
    np.testing.assert_array_equal(target.params["embed"]["weight"], tensors["token_embd.weight"])
    for i in range(2):
        layers = target.params["layers"]
        down = layers["mlp"]["down"]["weight"][i] if stacked else layers[i]["mlp"]["down"]["weight"]
        np.testing.assert_array_equal(down, tensors[f"blk.{i}.ffn_down.weight"])


@pytest.fixture
def gguf_file(tiny, tmp_path):
    return write(tiny.model("llama"), tmp_path / "model.gguf")


def test_truncation_is_seen_before_any_weight_is_read(gguf_file):
    contents = gguf_file.read_bytes()
    for size in (len(contents) - 64, len(contents) // 2):
        gguf_file.write_bytes(contents[:size])
        with pytest.raises(UsageError, match=rf"model.gguf is cut short: it has {size:,} bytes and its tensors need"):
            load(gguf_file)


@pytest.mark.parametrize("size", [4, 20, 30, 300, 1000])
def test_truncation_within_the_header(gguf_file, size):
    gguf_file.write_bytes(gguf_file.read_bytes()[:size])
    with pytest.raises(UsageError, match=r"model.gguf is cut short"):
        load(gguf_file)


def test_not_a_gguf(tmp_path):
    file = tmp_path / "page.gguf"
    for contents in (b"<!doctype html>" * 10, b""):
        file.write_bytes(contents)
        with pytest.raises(UsageError, match=r"page.gguf is not a GGUF file"):
            load(file)


def test_unknown_version(gguf_file):
    contents = bytearray(gguf_file.read_bytes())
    contents[4] = 1
    gguf_file.write_bytes(contents)
    with pytest.raises(UsageError, match="GGUF version 1"):
        load(gguf_file)


def test_other_architectures_are_refused_by_name(tmp_path):
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(file), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match=r'model.gguf has the architecture "mamba", which specjax does not support'):
        load(file)


def test_header_equals_the_reference_reader(gguf_file):
    meta, tensors = read_header(gguf_file)
    reader = gguf.GGUFReader(str(gguf_file))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert meta[name] == field.contents(), name
    assert {t.name: (t.data_offset, tuple(map(int, t.shape[::-1]))) for t in reader.tensors} == {
        name: (t.offset, t.shape) for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("split.count", 3, "is part 1 of 3 of a split GGUF file; merge the parts with llama-gguf-split --merge"),
        ("general.type", "adapter", "is an adapter, not a model; merge it into its base model"),
        ("general.type", "mmproj", 'contains "mmproj", not a language model'),
    ],
)
def test_parts_and_adapters_are_named(name, value, words, tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    (writer.add_uint16 if isinstance(value, int) else writer.add_string)(name, value)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match=words):
        load(tmp_path / "x.gguf")


def test_formats_before_gguf_are_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"tjgg" + bytes(64))
    with pytest.raises(UsageError, match="has the format ggjt, which is older than GGUF"):
        load(tmp_path / "x.gguf")


def test_a_field_that_is_not_read_is_named(tiny, tmp_path):
    write(tiny.model("llama"), tmp_path / "x.gguf")
    meta = read_header(tmp_path / "x.gguf")[0]
    assert "llama.attention.temp" not in meta
    contents = (tmp_path / "x.gguf").read_bytes()
    name = b"llama.rope.freq_base"
    assert contents.count(name) == 1
    (tmp_path / "x.gguf").write_bytes(contents.replace(name, b"llama.attention.temp"))
    with pytest.warns(CheckpointWarning, match=r"a field that is not read, .*: llama.attention.temp$"):
        read(tmp_path / "x.gguf", dtype="float32", stacked=True, name="x")
