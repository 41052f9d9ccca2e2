"""Whisper models with tiny random weights: folders of transformers and of CTranslate2, and recordings."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import tokenizers

START, END, ENGLISH, GERMAN, TRANSCRIBE, TRANSLATE, NO_TIMES = 50, 49, 51, 52, 53, 54, 55
FIRST_TIME = NO_TIMES + 1
SIZES = {
    "vocab_size": 81, "num_mel_bins": 6, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 24,
    "max_source_positions": 24, "max_target_positions": 64, "decoder_start_token_id": START, "pad_token_id": END,
    "bos_token_id": END, "eos_token_id": END, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
"""A window has 48 frames, which are 0.48 seconds and 24 steps of time."""
PIECES = {
    END: "<|endoftext|>", START: "<|startoftranscript|>", ENGLISH: "<|en|>", GERMAN: "<|de|>",
    TRANSCRIBE: "<|transcribe|>", TRANSLATE: "<|translate|>", NO_TIMES: "<|notimestamps|>",
}  # fmt: skip
GENERATION = {
    "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "no_timestamps_token_id": NO_TIMES,
    "is_multilingual": True, "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}, "suppress_tokens": [5, 6, *range(50, 55)],
    "begin_suppress_tokens": [3, END], "max_initial_timestamp_index": 10, "max_length": 64,
}  # fmt: skip


def save_whisper(folder, seed=0, **options):
    """Save a model of transformers with sharp random weights to a folder, and return it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SIZES | options)).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            is_norm = "norm" in key and key.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.35 + (1.0 if is_norm else 0.0))
        model.model.decoder.embed_tokens.weight.mul_(2)
        model.model.decoder.embed_tokens.weight[FIRST_TIME:].mul_(2)  # times are likely, so windows have segments
    model.generation_config = transformers.GenerationConfig.from_dict(GENERATION)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    write_tokenizer(folder)
    return model


def write_tokenizer(folder):
    words = {PIECES.get(i, f"w{i}"): i for i in range(FIRST_TIME)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def recording(seconds, seed=0):
    """Return samples of tones that change, with noise."""
    rng, count = np.random.default_rng(seed), int(16_000 * seconds)
    pitch = np.repeat(rng.uniform(100, 4000, count // 800 + 1), 800)[:count]
    return (0.3 * np.sin(np.cumsum(pitch) * 2 * np.pi / 16_000) + 0.02 * rng.normal(size=count)).astype(np.float32)


def write_ctranslate2(folder, model, version=6, spec="WhisperSpec", kind=4):
    """Write a model of transformers in the format of CTranslate2, with weights of float16."""
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    values = {}

    def put(name, source, parts=("weight", "bias"), names=("weight", "bias")):
        for part, stored in zip(parts, names, strict=True):
            values[f"{name}/{stored}"] = state[f"model.{source}.{part}"]

    def join(name, sources):
        for part in ("weight", "bias"):
            arrays = [state.get(f"model.{source}.{part}") for source in sources]
            filled = [np.zeros(16, np.float32) if value is None else value for value in arrays]
            values[f"{name}/{part}"] = np.concatenate(filled)

    norm = {"names": ("gamma", "beta")}
    for stack in ("encoder", "decoder"):
        for layer in range(2):
            name, source = f"{stack}/layer_{layer}", f"{stack}.layers.{layer}"
            join(f"{name}/self_attention/linear_0", [f"{source}.self_attn.{part}_proj" for part in "qkv"])
            put(f"{name}/self_attention/linear_1", f"{source}.self_attn.out_proj")
            put(f"{name}/self_attention/layer_norm", f"{source}.self_attn_layer_norm", **norm)
            put(f"{name}/ffn/linear_0", f"{source}.fc1")
            put(f"{name}/ffn/linear_1", f"{source}.fc2")
            put(f"{name}/ffn/layer_norm", f"{source}.final_layer_norm", **norm)
            if stack == "decoder":
                put(f"{name}/attention/linear_0", f"{source}.encoder_attn.q_proj")
                join(f"{name}/attention/linear_1", [f"{source}.encoder_attn.{part}_proj" for part in "kv"])
                put(f"{name}/attention/linear_2", f"{source}.encoder_attn.out_proj")
                put(f"{name}/attention/layer_norm", f"{source}.encoder_attn_layer_norm", **norm)
        put(f"{stack}/layer_norm", f"{stack}.layer_norm", **norm)
        values[f"{stack}/position_encodings/encodings"] = state[f"model.{stack}.embed_positions.weight"]
    put("encoder/conv1", "encoder.conv1")
    put("encoder/conv2", "encoder.conv2")
    values["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]
    small = {"decoder/num_heads": ("<h", 2), "encoder/num_heads": ("<h", 4), "decoder/activation": ("<b", 3),
             "decoder/pre_norm": ("<b", 1), "decoder/scale_embeddings": ("<b", 0)}  # fmt: skip
    text = lambda value: struct.pack("<H", len(value) + 1) + value.encode() + b"\0"
    out = [struct.pack("<I", version), text(spec), struct.pack("<II", 3, len(values) + len(small))]
    for name, (form, value) in small.items():
        packed = struct.pack(form, value)
        out += [text(name), struct.pack("<BBI", 0, {1: 1, 2: 2}[len(packed)], len(packed)), packed]
    for name, value in values.items():
        packed = value.astype({4: np.float16, 1: np.int8, 2: np.int16}[kind]).tobytes()
        out += [text(name), struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)]
        out += [struct.pack("<BI", kind, len(packed)), packed]
    (folder / "model.bin").write_bytes(b"".join([*out, struct.pack("<I", 0)]))
    (folder / "vocabulary.txt").write_text("\n".join(PIECES.get(i, f"w{i}") for i in range(81)))
    names = {"suppress_ids": "suppress_tokens", "suppress_ids_begin": "begin_suppress_tokens"}
    config = {name: GENERATION[field] for name, field in names.items()} | {"lang_ids": [ENGLISH], "alignment_heads": []}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
