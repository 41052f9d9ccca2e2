"""Files made to break the readers: each either loads or is refused in one short sentence."""

from __future__ import annotations

import base64
import functools
import json
import os
import random
import shutil
import struct
import sys

import numpy as np
import pytest
from hostile import as_json, attacks, changed_bytes, changed_json, gguf_bytes, survives

from specjax.errors import UsageError
from specjax.models import load
from specjax.models.loading import load_tokenizer
from specjax.models.loading.families.config_fields import LAYERS
from specjax.models.loading.formats import hf
from specjax.planning.inputs.model_configs import load_config

WIDTH, HEADS, KV, DIM, MLP, VOCAB = 8, 2, 1, 4, 12, 40
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, WIDTH),
    "model.norm.weight": (WIDTH,),
    "model.layers.0.input_layernorm.weight": (WIDTH,),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * DIM, WIDTH),
    "model.layers.0.self_attn.k_proj.weight": (KV * DIM, WIDTH),
    "model.layers.0.self_attn.v_proj.weight": (KV * DIM, WIDTH),
    "model.layers.0.self_attn.o_proj.weight": (WIDTH, HEADS * DIM),
    "model.layers.0.post_attention_layernorm.weight": (WIDTH,),
    "model.layers.0.mlp.gate_proj.weight": (MLP, WIDTH),
    "model.layers.0.mlp.up_proj.weight": (MLP, WIDTH),
    "model.layers.0.mlp.down_proj.weight": (WIDTH, MLP),
}
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 1, "hidden_act": "silu",
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM, "intermediate_size": MLP,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
    "eos_token_id": [2],
    "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 16},
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3", "text_config": CONFIG | {
        "rope_scaling": None, "layer_types": ["full_attention"], "sliding_window": 4, "query_pre_attn_scalar": 4,
        "final_logit_softcapping": 30.0, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6,
    },
}  # fmt: skip
TOKENIZER_CONFIG = {"eos_token": {"content": "</s>"}, "bos_token": "w3", "chat_template": "{{ messages[0].content }}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a complete model folder of two shards."""
    import tokenizers
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for shard, stored in shards.items():
        save_file({name: tensors[name] for name in stored}, folder / shard)
    index = {"weight_map": {name: shard for shard, stored in shards.items() for name in stored}}
    for name, document in (
        ("config.json", CONFIG),
        (hf.INDEX, index),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("generation_config.json", {"eos_token_id": 2}),
    ):
        (folder / name).write_text(json.dumps(document))
    words = {"<unk>": 0, "</s>": 2, "a": 1, "w": 3, "3": 4} | {f"w{i - 2}": i for i in range(5, VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("w", "3")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\s+"), "isolated")
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "_")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    load(folder)
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


def change(folder, name, **values) -> None:
    document = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(document | values))


def use(source) -> None:
    """Load a model and use its tokenizer."""
    _, tokenizer = load(source)
    tokenizer.decode(tokenizer.encode("a w3 w4</s> aaaa b"))


FIELDS = {
    "rope_theta": [0, -1.0, float("nan"), float("inf"), "x", 10**400],
    "rms_norm_eps": [-1, 0, float("nan"), [1]],
    "vocab_size": [0, -1, 1 << 31, 40.0, True, "40"],
    "hidden_size": [0, 1 << 40, None],
    "num_hidden_layers": [10**9, 100_000, 2, 0, [1]],
    "num_attention_heads": [0, -2, 3, {}],
    "num_key_value_heads": [0, 3],
    "head_dim": [0, -4, 3],
    "intermediate_size": [0, 1 << 60],
    "max_position_embeddings": [0, -1],
    "eos_token_id": ["</s>", -1, 1 << 40, [2, "x"], {}],
    "tie_word_embeddings": ["yes", 1],
    "model_type": [7, ["llama"], "\x1b]0;x\x07" + "m" * 100_000],
    "rope_scaling": [7, [1], {"rope_type": "linear", "factor": 0}, {"rope_type": "linear"}, {"rope_type": ["x"]}],
    "layer_types": [7, [7]],
    "quantization_config": [7],
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_cannot_be_is_named(name, copy):
    for value in FIELDS[name]:
        change(copy, "config.json", **{name: value})
        sentence = survives(lambda: use(copy), value)
        assert sentence is not None, value
        if name not in ("rope_scaling", "quantization_config", "num_hidden_layers", "model_type"):
            assert name in sentence or "do not fit its configuration" in sentence, (value, sentence)
        (copy / "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.parametrize("value", [0, -5, 1.5, "x"])
def test_windows_that_cannot_be(value, copy):
    config = GEMMA["text_config"] | {"model_type": "gemma3_text", "sliding_window": value}
    (copy / "config.json").write_text(json.dumps(config))
    assert "sliding_window" in survives(lambda: use(copy))


def test_code_of_a_folder_is_never_run(copy, monkeypatch, capsys):
    """Loading refuses without a prompt on the terminal; by default `transformers` prompts there for fifteen seconds."""
    (copy / "tokenizer.json").unlink()
    (copy / "vocab.json").write_text("{}")
    (copy / "code.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\nclass T: pass\n")
    auto_map = {"AutoTokenizer": ["code.T", "code.T"], "AutoConfig": "code.T"}
    change(copy, "config.json", auto_map=auto_map, model_type="other")
    change(copy, "tokenizer_config.json", auto_map=auto_map, tokenizer_class="T")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    monkeypatch.setattr(sys, "stdin", None)
    assert "specjax never runs code of a model" in survives(lambda: load_tokenizer(copy))
    assert not (copy / "ran").exists() and "y/N" not in "".join(capsys.readouterr())


OUTSIDE = ["../a.safetensors", "/etc/passwd", "x/../../a", "..", "", 7, None, "a\x00.safetensors"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_shards_outside_of_the_folder(name, copy):
    (copy / hf.INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert hf.INDEX in survives(lambda: use(copy))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "a.safetensors", hf.INDEX, "chat_template.jinja"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "device"])
def test_what_never_ends_is_not_opened(name, make, copy):
    (copy / name).unlink(missing_ok=True)
    make(copy / name)
    for read in (load, load_tokenizer):
        assert "is not a regular file" in survives(lambda read=read: read(copy))


def table(folder, **entries) -> None:
    """Rewrite the header of a shard, {name: {field: value}}, and leave its data."""
    file = folder / "a.safetensors"
    contents = file.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + length])
    for name, changes in entries.items():
        header[name] = header.get(name, {}) | changes
    head = json.dumps(header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + contents[8 + length :])


def test_tables_of_safetensors_that_do_not_fit(copy, folder):
    name = min(SHAPES)
    for changes in (
        {"data_offsets": [-8, 0]}, {"data_offsets": [0, 8]}, {"data_offsets": [8, 1288]}, {"data_offsets": "x"},
        {"shape": [80, 4, 2]}, {"shape": ["40", 8]}, {"shape": [1] * 70_000}, {"shape": [10**4000]}, {"dtype": 7},
        {"dtype": "I8"},
    ):  # fmt: skip
        table(copy, **{name: changes})
        assert survives(lambda: use(copy), changes) is not None, changes
        shutil.copy(folder / "a.safetensors", copy)


def test_a_tensor_that_is_there_twice(copy):
    file = copy / "a.safetensors"
    contents = file.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    head = contents[8 : 8 + length].strip()
    first = json.dumps({min(SHAPES): {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}).encode()
    again = first[:-1] + b"," + head[1:]
    file.write_bytes(len(again).to_bytes(8, "little") + again + contents[8 + length :])
    assert "two entries with the same name" in survives(lambda: use(copy))
    file.write_bytes(contents)
    shutil.copy(file, copy / "c.safetensors")
    (copy / hf.INDEX).unlink()
    assert "in a.safetensors and in c.safetensors" in survives(lambda: use(copy))


@pytest.mark.parametrize("source", ["a" * 5000, "~nobody-of-that-name/x", "a\0b", 7, ["x"], "\udc80"])
@pytest.mark.parametrize("read", [load, load_tokenizer, lambda source: load_config(source, "float32")])
def test_names_that_no_file_has(source, read):
    if isinstance(source, str) or read in (load, load_tokenizer):
        assert len(survives(lambda: read(source))) < 1500


def test_an_id_that_no_vocabulary_has(copy):
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["q"] = 1 << 31
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "41 tokens but the token id 2147483648" in survives(lambda: use(copy))


def test_a_tokenizer_that_panics(copy):
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pattern"] = {"Regex": "(a+)+$"}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    _, actual = load(copy)
    assert "fails on this text" in survives(lambda: actual.encode("a" * 40 + "b"))


def replace(content: str, **pattern) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


TWICE = {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 8, "pair": [], "special_tokens": {}}
CHARACTERS = base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"b" * 200 + b"\0").decode()
GROWING = {
    "normalizer": {"type": "Sequence", "normalizers": [replace("a" * 30, String="a")] * 5},
    "empty": {"type": "Sequence", "normalizers": [replace("x", Regex="(?=a)|b*")] * 20},
    "table": {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": CHARACTERS}] * 3},
    "nested": {
        "type": "Sequence",
        "normalizers": [{"type": "Sequence", "normalizers": [replace("aa", String="a")]}] * 99,
    },
    "decoder": {"type": "Sequence", "decoders": [replace("a" * 30, String="a")] * 99},
    "post_processor": {"type": "Sequence", "processors": [{"type": "TemplateProcessing"} | TWICE] * 9},
}


@pytest.mark.parametrize("name", GROWING)
def test_rules_that_multiply_a_text(name, copy):
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    field = name if name in ("decoder", "post_processor") else "normalizer"
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer | {field: GROWING[name]}))
    assert "times as long" in survives(lambda: load_tokenizer(copy))


def test_rules_of_ordinary_tokenizers(copy):
    """These are the rules of T5 and Llama 2."""
    plain = load_tokenizer(copy).encode("a b")
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    rules = [replace("\u2581", String=" "), replace(" ", Regex=" {2,}"), {"type": "NFKC"}, replace('"', String="``")]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": rules}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load_tokenizer(copy).encode("a b") == plain


@pytest.mark.parametrize(("rng", "count"), attacks(150, 60_000))
@pytest.mark.parametrize("which", ["llama", "gemma"])
def test_configs(which, rng, count, copy):
    for case in range(count):
        document = changed_json(rng, CONFIG if which == "llama" else GEMMA)
        (copy / "config.json").write_bytes(as_json(rng, document))
        survives(functools.partial(hf.read if case % 4 else use, copy), document)


@pytest.mark.parametrize(("rng", "count"), attacks(150, 40_000))
def test_the_rest_of_a_folder(rng, count, copy, folder):
    files = ["tokenizer_config.json", "generation_config.json", hf.INDEX, "tokenizer.json"]
    for case in range(count):
        file = rng.choice(files)
        document = changed_json(rng, json.loads((folder / file).read_text()))
        (copy / file).write_bytes(as_json(rng, document))
        survives(lambda: use(copy), (case, file, document))
        shutil.copy(folder / file, copy)


@pytest.mark.parametrize(("rng", "count"), attacks(150))
def test_safetensors(rng, count, copy, folder):
    contents = (folder / "a.safetensors").read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header, data = json.loads(contents[8 : 8 + length]), contents[8 + length :]
    for case in range(count):
        if rng.random() < 0.5:
            hostile = changed_bytes(rng, contents, 8 + length)
        else:
            head = as_json(rng, changed_json(rng, header))
            hostile = len(head).to_bytes(8, "little") + head + data
        (copy / "a.safetensors").write_bytes(hostile)
        survives(lambda: hf.read(copy), case)


NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip


def gguf_parts(model: str = "llama", arch: str = "llama"):
    """Return (fields, tensors, data) of a complete file."""
    pieces = ["<unk>", "<s>", "</s>", "a", "b", "ab", *(f"w{i}" for i in range(6, VOCAB))]
    fields: dict = {
        "general.architecture": arch, "general.alignment": 32, f"{arch}.block_count": 1, f"{arch}.context_length": 64,
        f"{arch}.embedding_length": WIDTH, f"{arch}.feed_forward_length": MLP, f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV, f"{arch}.attention.key_length": DIM, f"{arch}.rope.freq_base": 1e4,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5, f"{arch}.attention.sliding_window": 8,
        f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": 2.0,
        "tokenizer.ggml.model": model, "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(i) for i in range(VOCAB)], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (VOCAB - 3)], "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    if arch == "gemma3":
        fields |= {"gemma3.attention.sliding_window_pattern": [False], "gemma3.final_logit_softcapping": 30.0}
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    tensors, at = [], 0
    for name, shape in SHAPES.items():
        stored = names.get(name) or f"blk.0.{NAMES[name[len('model.layers.0.') : -len('.weight')]]}.weight"
        tensors.append((stored, shape[::-1], 0, at))
        at += -(-4 * int(np.prod(shape)) // 32) * 32
    if arch == "gemma3":
        for extra in ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"):
            tensors.append((f"blk.0.{extra}.weight", (DIM if extra.startswith("attn") else WIDTH,), 0, at))
            at += 32
    return fields, tensors, np.zeros(at // 4, np.float32).tobytes()


KINDS = [("llama", "llama"), ("gpt2", "llama"), ("llama", "gemma3")]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(("model", "arch"), KINDS)
def test_gguf_files_that_are_whole_load(model, arch, file):
    file.write_bytes(gguf_bytes(*gguf_parts(model, arch)))
    assert survives(lambda: use(file)) is None


GGUF_FIELDS = {
    "general.alignment": [0, 7, -8, 4, "32", 33, True],
    "llama.block_count": [100_000, 10**9, 2, 0, "1"],
    "llama.attention.head_count": [0, [2, 2], -1, 3, 2.0],
    "llama.attention.head_count_kv": [0, 5],
    "llama.attention.key_length": [0, 3, 1 << 40],
    "llama.attention.sliding_window": [0, -5, 1 << 40],
    "llama.rope.freq_base": [0.0, float("nan"), float("inf"), -1.0, "x"],
    "llama.rope.scaling.factor": [-1.0, float("inf"), [1]],
    "llama.attention.layer_norm_rms_epsilon": [-1.0, float("nan")],
    "tokenizer.ggml.tokens": [[], 7, [1, 2]],
    "tokenizer.ggml.scores": [[0.5], ["x"] * VOCAB, 7],
    "tokenizer.ggml.token_type": [[1], ["x"] * VOCAB],
    "tokenizer.ggml.eos_token_id": [-1, "x", 1 << 40],
    "tokenizer.ggml.unknown_token_id": [-1, VOCAB],
    "tokenizer.ggml.add_bos_token": ["no"],
}


@pytest.mark.parametrize("name", GGUF_FIELDS)
def test_a_field_of_gguf_that_cannot_be_is_named(name, file):
    fields, tensors, data = gguf_parts()
    for value in GGUF_FIELDS[name]:
        file.write_bytes(gguf_bytes(fields | {name: value}, tensors, data))
        sentence = survives(lambda: use(file), value)
        assert sentence is not None, value
        if name not in ("llama.block_count", "tokenizer.ggml.tokens"):
            assert name in sentence or "do not fit its configuration" in sentence, (value, sentence)


@pytest.mark.parametrize("merges", [["ab"], ["a b", "b a"], ["a zz"], [" "], [7], 7])
def test_merges_that_do_not_fit(merges, file):
    fields, tensors, data = gguf_parts("gpt2")
    file.write_bytes(gguf_bytes(fields | {"tokenizer.ggml.merges": merges}, tensors, data))
    assert survives(lambda: use(file)) is not None


def test_tables_of_gguf_that_do_not_fit(file):
    fields, tensors, data = gguf_parts()
    name, shape, kind, at = tensors[0]
    for hostile in (
        [tensors[0], *tensors],
        [(name, shape, kind, 32), *tensors[1:]],
        [(name, shape, kind, at + 4), *tensors[1:]],
        [(name, shape, kind, 1 << 62), *tensors[1:]],
        [(name, (1,) * 70_000, kind, at), *tensors[1:]],
        [(name, (), kind, at), *tensors[1:]],
        [(name, (8, 0), kind, at), *tensors[1:]],
        [(name, (1 << 62, 1 << 62), kind, at), *tensors[1:]],
        [(name, shape, 2, at), *tensors[1:]],
        [(name, shape, 77, at), *tensors[1:]],
        [*tensors, ("rope_freqs.weight", (), 0, at)],
        [*tensors, ("rope_freqs.weight", (4,), 0, len(data) - 32)],
        tensors[1:],
    ):
        file.write_bytes(gguf_bytes(fields, hostile, data))
        assert survives(lambda: use(file)) is not None, hostile[0]


def test_lists_within_lists(file):
    fields, tensors, data = gguf_parts()
    full = gguf_bytes(fields, tensors, data)
    deep = struct.pack("<Q", 1) + b"x" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    file.write_bytes(full[:24] + deep + full[24:])
    assert "header cannot be read" in survives(lambda: use(file))


def test_a_layer_of_every_name_in_a_small_file(file):
    """The file has 100,000 empty layers."""
    fields, tensors, data = gguf_parts()
    for layers in (100_000, LAYERS):
        many = [(f"blk.{i}.attn_q.weight", (1,), 0, len(data) + 32 * i) for i in range(layers)]
        contents = gguf_bytes(fields | {"llama.block_count": layers}, [*tensors[:2], *many], data + bytes(32 * layers))
        file.write_bytes(contents)
        assert survives(lambda: use(file)) is not None


@pytest.mark.parametrize(("rng", "count"), attacks(300, 34_000))
@pytest.mark.parametrize(("model", "arch"), KINDS)
def test_gguf(model, arch, rng, count, file):
    fields, tensors, data = gguf_parts(model, arch)
    full = gguf_bytes(fields, tensors, data)
    for case in range(count):
        kind = rng.randrange(3)
        if kind == 0:
            hostile = changed_bytes(rng, full, len(full) - len(data))
        elif kind == 1:
            changed = changed_json(rng, fields)
            hostile = gguf_bytes(changed if isinstance(changed, dict) else {}, tensors, data)
        else:
            hostile = gguf_bytes(fields, changed_table(rng, tensors), data)
        file.write_bytes(hostile)
        survives(lambda: use(file), case)


def changed_table(rng: random.Random, tensors: list) -> list:
    number = lambda: rng.choice((0, 1, 4, 8, 31, 32, 64, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1))
    tensors = list(tensors)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(tensors))
        name, shape, kind, offset = tensors[at]
        changed = [
            (name, shape, kind, number()),
            (name, shape, rng.randrange(60), offset),
            (name, tuple(number() for _ in range(rng.randrange(6))), kind, offset),
            (rng.choice(("", name + "x", "rope_freqs.weight", "output.weight", tensors[0][0])), shape, kind, offset),
        ]
        tensors[at] = rng.choice(changed)
    return tensors


@pytest.mark.parametrize(("rng", "count"), attacks(200))
def test_llama2c(rng, count, tmp_path, data):
    stories = data / "stories260K"
    model, tokenizer = (stories / name for name in ("stories260K.bin", "tok512.bin"))
    start, pieces = model.read_bytes()[:28], tokenizer.read_bytes()
    copies = tmp_path / model.name, tmp_path / tokenizer.name
    for source, target in zip((model, tokenizer), copies, strict=True):
        shutil.copy(source, target)
    for case in range(count):
        with open(copies[0], "r+b") as handle:
            handle.write(changed_bytes(rng, start)[:28].ljust(28, b"\0") if case % 3 == 0 else start)
        copies[1].write_bytes(pieces if case % 3 == 0 else changed_bytes(rng, pieces))

        def read():
            actual = load_tokenizer(copies[0])
            actual.decode(actual.encode("Once upon a time\x00 é"))

        survives(read, case)


def test_a_pipe_in_place_of_the_tokenizer_of_llama2c(tmp_path, data):
    shutil.copy(data / "stories260K" / "stories260K.bin", tmp_path)
    os.mkfifo(tmp_path / "tok512.bin")
    with pytest.raises(UsageError, match="is not a regular file"):
        load(tmp_path / "stories260K.bin")
