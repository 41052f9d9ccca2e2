"""Draft heads from all dialects: the same weights in each of them, and files that are refused."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import dialects as d
import jax
import numpy as np
import pytest
from head_oracles import (
    DRAFT,
    STREAMS,
    TOKENS,
    attended,
    fed,
    logits,
    norm,
    params_of,
    same,
    shapes_of_target,
    silu,
    target,
)
from heads import layer_of, tiny_head
from safetensors.numpy import load_file
from toy import markov

from specjax import Target, UsageError
from specjax.errors import CheckpointWarning
from specjax.models import LlamaConfig
from specjax.models.heads.blocks import abstract_params
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.eagle import EagleConfig
from specjax.models.heads.eagle3 import Eagle3, Eagle3Config, eagle3_head
from specjax.models.heads.hydra import HydraConfig
from specjax.models.heads.kinds import init_head
from specjax.models.heads.mlp_speculator import MlpSpeculatorConfig
from specjax.models.heads.ppd import PpdConfig
from specjax.models.heads.redrafter import ReDrafterConfig
from specjax.models.loading.heads import (
    LoadedHead,
    dflash,
    falcon,
    hydra,
    load_head,
    mlp_speculator,
    ppd,
    read_head,
    recognise,
    redrafter,
    save_head,
)
from specjax.models.loading.heads.checking import check_head
from specjax.models.loading.heads.describing import describe_layers
from specjax.models.loading.heads.writing import stored_name


def drafted_twice(layers, state, embedding, head):
    """Run `layers(embedded, state)` over the pairs, and then over one more pair with its own output as state."""
    embedded, loaded = embedding[TOKENS], []
    for _ in range(2):
        outputs = layers(embedded, state)
        loaded.append(head(outputs[-1]))
        state, embedded = np.concatenate([state, outputs[-1:]]), np.concatenate([embedded, embedding[[DRAFT]]])
    return np.stack(loaded)


def eagle3_oracle(arrays, hd):
    w = {name: value.astype(np.float64) for name, value in arrays.items()}
    block = "layers.0"

    def layers(embedded, state):
        read = [norm(embedded, w[f"{block}.input_layernorm.weight"]), norm(state, w[f"{block}.hidden_norm.weight"])]
        x = state + attended(np.concatenate(read, -1), w, f"{block}.self_attn", hd)
        return x + fed(norm(x, w[f"{block}.post_attention_layernorm.weight"]), w, f"{block}.mlp")

    def head(outputs):
        full = np.full(d.V, -np.inf)
        full[d.IDS] = norm(outputs, w["norm.weight"]) @ w["lm_head.weight"].T
        return full

    state = np.concatenate([STREAMS[tap] for tap in d.TAPS], -1).astype(np.float64) @ w["fc.weight"].T
    return drafted_twice(layers, state, params_of("embed"), head)


def eagle_oracle(arrays, hd):
    w = {name: value.astype(np.float64) for name, value in arrays.items()}

    def layers(embedded, state):
        x = np.concatenate([embedded, state], -1) @ w["fc.weight"].T + w["fc.bias"]
        x = x + attended(x, w, "layers.0.self_attn", hd)
        return x + fed(norm(x, w["layers.0.post_attention_layernorm.weight"]), w, "layers.0.mlp")

    embedding, head = w["embed_tokens.weight"], params_of("head")
    return drafted_twice(layers, STREAMS[d.L].astype(np.float64), embedding, lambda outputs: outputs @ head.T)


def falcon_oracle(arrays, hd):
    """Return both tokens of the first block, the last two pairs. The authors call the LSTM without `batch_first`."""
    import torch

    w = {name: value.astype(np.float64) for name, value in arrays.items()}
    lstm = torch.nn.LSTM(2 * d.D, d.D, num_layers=2, dtype=torch.float64)
    lstm.load_state_dict({name[5:]: torch.from_numpy(x) for name, x in w.items() if name.startswith("lstm.")})
    pairs = np.concatenate([w["embed_tokens.weight"][TOKENS], STREAMS[d.L].astype(np.float64)], -1)
    x = lstm(torch.from_numpy(pairs)[None])[0][0].detach().numpy()
    x = x + attended(x, w, "layers.0.self_attn", hd, 2)
    x = x + fed(norm(x, w["layers.0.post_attention_layernorm.weight"]), w, "layers.0.mlp")
    return x[-2:] @ params_of("head").T


def medusa_oracle(arrays):
    w = {name: value.astype(np.float64) for name, value in arrays.items()}
    z = STREAMS[d.L, -1].astype(np.float64)
    outputs = []
    for i in range(2):
        x = z + silu(z @ w[f"blocks.{i}.layers.0.weight"].T + w[f"blocks.{i}.layers.0.bias"])
        outputs.append(x @ w[f"lm_heads.{i}.weight"].T)
    return np.stack(outputs)


@pytest.mark.parametrize("hd", [8, 16])
def test_eagle3_is_one_head_in_every_dialect(hd, tmp_path):
    arrays = d.eagle3(hd)
    expected = eagle3_oracle(arrays, hd)
    assert np.isfinite(expected).sum() == 2 * d.VD
    for writer, (config, tensors) in d.eagle3_dialects(arrays, hd).items():
        loaded = read_head(d.write(tmp_path / writer, config, tensors), target())
        assert (loaded.kind, loaded.dialect) == ("eagle3", writer if writer != "fused" else "modelopt")
        assert loaded.head.head.taps == d.TAPS
        same(logits(loaded.head), expected)


def test_eagle_is_one_head_in_every_dialect(tmp_path, hd=16):
    arrays = d.eagle(hd)
    expected = eagle_oracle(arrays, hd)
    plain = d.layers(hd) | {"architectures": ["LlamaForCausalLM"]}
    older = d.renamed(arrays, ("layers.0.", "transformer."), ("fc.", "fusion_fc."))
    for config, tensors, name in (
        (plain, arrays, "model.safetensors"),
        (plain, arrays, "pytorch_model.bin"),
        (plain, d.fused(arrays), "model.safetensors"),
        (d.of_speculators("eagle", hd, fusion_bias=True, layernorms=False), older, "model.safetensors"),
    ):
        folder = d.write(tmp_path / f"{len(list(tmp_path.iterdir()))}", config, tensors, name)
        assert recognise(folder)[0] == "eagle"
        same(logits(load_head(folder, target())), expected)


def test_falcon_by_its_authors(tmp_path, hd=16):
    arrays = d.falcon(hd)
    config = d.layers(hd) | {"architectures": ["LlamaForCausalLM"], "k_mask": 2, "bias": True}
    folder = d.write(tmp_path / "authors", config, arrays, "pytorch_model.bin")
    assert recognise(folder) == ("falcon", "authors")
    loaded = read_head(folder, target())
    assert loaded.flags == {"block_size": 2, "lstm_layers": 2, "carries": False, "bias": True, "embeds": True}
    same(logits(loaded.head), falcon_oracle(arrays, hd))
    ((_, ours, _),) = falcon.variants(loaded.head, d.L)
    save_head(tmp_path / "ours", ours)
    again = load_head(tmp_path / "ours", target())
    same_head(again, ours)
    assert again.head.config.carries
    for number, (changes, message) in enumerate(
        (
            ({"k_mask": None}, "lacks the field k_mask"),
            ({"bias": False}, "has bias false, and .* has lstm.bias_ih_l0"),
            ({"num_hidden_layers": 2}, "has num_hidden_layers 2, and the file has 1 layers of a head"),
        )
    ):
        with pytest.raises(UsageError, match=message):
            load_head(d.write(tmp_path / f"bad {number}", config | changes, arrays), target())


def test_medusa_by_its_authors_and_by_vllm(tmp_path):
    arrays = d.medusa()
    expected = medusa_oracle(arrays)
    fewer = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    authors = d.renamed(arrays, ("blocks.", ""), (".layers.0.", ".0.linear."), ("lm_heads.", ""))
    authors = {f"{name[0]}.1.weight" if name.count(".") == 1 else name: value for name, value in authors.items()}
    vllm = {"model_type": "medusa", "num_heads": 3}
    prefixed = {f"medusa_heads.{name}" if "blocks" in name else name: value for name, value in arrays.items()}
    for config, tensors, name in (
        (fewer, authors, "medusa_lm_head.safetensors"),
        (fewer, authors, "medusa_lm_head.pt"),
        (vllm, arrays, "model.safetensors"),
        (vllm, prefixed, "model.safetensors"),
    ):  # fmt: skip
        folder = d.write(tmp_path / f"{len(list(tmp_path.iterdir()))}", config, tensors, name)
        loaded = read_head(folder, target())
        assert loaded.flags["num_heads"] == 3, "the heads in the file count"
        assert bool(loaded.notes) == ("medusa_num_heads" in config)
        same(logits(loaded.head), expected)


def test_medusa_of_some_ids(tmp_path):
    arrays = d.medusa(2, d.VD)
    config = {"model_type": "medusa", "num_heads": 2, "truncated_vocab_size": d.VD}
    loaded = logits(load_head(d.write(tmp_path, config, arrays | {"token_map": d.IDS}), target()))
    expected = np.full((2, d.V), -np.inf)
    expected[:, d.IDS] = medusa_oracle(arrays)
    same(loaded, expected)


def written(folder, arrays=None, hd=8, **changes):
    """Write a head of speculators with changes of its config; None removes a field."""
    config, tensors = d.eagle3_dialects(d.eagle3(hd) if arrays is None else arrays, hd)["speculators"]
    config = {name: value for name, value in (config | changes).items() if value is not None}
    return d.write(folder, config, tensors)


NORMS = {f"fc_norm.{i}.weight": (d.D,) for i in range(3)}
FLAGS = {
    "norm_before_residual": ({}, {"norm_before_residual": True}, (True, True)),
    "norm_output": ({}, {"norm_output": True}, (False, True)),  # shows from the second draft on
    "fc_norm": (NORMS, {"fc_norm": True}, (True, True)),
    "input_norm": ({"input_norm.weight": (3 * d.D,)}, {"norm_before_fc": True}, (True, True)),
    "qk_norm": ({f"layers.0.self_attn.{x}_norm.weight": (8,) for x in "qk"}, {}, (True, True)),
    "rope_theta": ({}, {"transformer_layer_config": d.layers(8, rope_theta=100.0)}, (True, True)),
    "layer_ids": ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, (True, True)),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_changes_what_the_head_says(flag, tmp_path):
    shapes, changes, changed = FLAGS[flag]
    arrays = d.eagle3() | d.arrays_of(shapes, seed=1)
    plain, other = (
        logits(load_head(written(tmp_path / "plain"), target())),
        load_head(written(tmp_path / "other", arrays, **changes), target()),
    )
    differs = np.nanmax(np.abs(np.where(np.isfinite(plain), logits(other) - plain, 0)), 1) > 1e-3
    assert tuple(differs) == changed
    save_head(tmp_path / "again", other)
    again = load_head(tmp_path / "again", target())
    assert again.head is other.head, "the layout of speculators has words for all of it"
    jax.tree.map(np.testing.assert_array_equal, again.params, other.params)


def test_older_names_of_norms_and_flags_of_others(tmp_path):
    """SpecForge numbers its norms by position, and its norm_output has another meaning without them."""
    names = zip(("low", "mid", "high"), range(3), strict=True)
    arrays = d.renamed(d.eagle3() | d.arrays_of(NORMS), *((f"fc_norm.{i}", f"aux_norm_{x}") for x, i in names))
    config, tensors = d.eagle3_dialects(arrays)["specforge"]
    loaded = read_head(d.write(tmp_path / "new", config, tensors), target())
    assert loaded.flags["norm_taps"] == "each" and loaded.flags["norm_output"]
    config, tensors = d.eagle3_dialects(d.eagle3())["specforge"]
    loaded = read_head(d.write(tmp_path / "old", config, tensors), target())
    assert not loaded.flags["norm_output"] and "there is no fc_norm" in loaded.notes[0]
    loaded = read_head(written(tmp_path / "unsaid", norm_before_residual=None), target())
    assert not loaded.flags["norm_before_residual"] and "vLLM assumes true" in loaded.notes[0]


def test_five_streams_of_deepspec_and_the_embedding_itself(tmp_path):
    config, _ = d.eagle3_dialects(d.eagle3())["deepspec"]
    arrays = d.eagle3(taps=5, vocab=d.V) | d.arrays_of({"embed_tokens.weight": (d.V, d.D)})
    config |= {"target_layer_ids": [-1, 0, 2, 4, 5], "draft_vocab_size": None}
    loaded = read_head(d.write(tmp_path, config, arrays), target())
    assert loaded.head.head.taps == (0, 1, 3, 5, 6) and loaded.flags["embeds"]
    assert np.isfinite(logits(loaded.head)).all(), "it drafts all ids"


def test_lists_of_streams_that_differ_are_noted(tmp_path):
    ids = d.eagle3_dialects(d.eagle3())["safeailab"][0].get("eagle_aux_hidden_state_layer_ids") or [2, 3, 3]
    outputs = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids]}
    same = read_head(written(tmp_path, eagle_aux_hidden_state_layer_ids=ids, eagle_config=outputs), target())
    assert not any("names the streams" in note for note in same.notes) and not same.unread
    other = read_head(
        written(tmp_path, eagle_aux_hidden_state_layer_ids=ids, eagle_config={"eagle_aux_hidden_state_layer_ids": ids}),
        target(),
    )
    assert other.head.head.taps == tuple(ids) and not other.unread
    assert any("in eagle_config.eagle_aux_hidden_state_layer_ids; the first are used" in note for note in other.notes)


def test_an_embedding_that_is_the_targets_is_not_kept_twice(tmp_path):
    arrays = d.eagle() | {"embed_tokens.weight": np.asarray(target().params["embed"]["weight"])}
    loaded = read_head(d.write(tmp_path, d.layers(8), arrays), target())
    assert not loaded.flags["embeds"] and "embed" not in loaded.head.params
    assert loaded.notes == ("embed_tokens equals the target's embedding and is shared",)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
@pytest.mark.parametrize("layout", ["speculators", "safeailab", "vllm"])
def test_what_is_saved_is_read_back_bit_by_bit(kind, layout, tmp_path):
    arrays, config = {
        "eagle": lambda: (d.eagle(16), d.layers(16)),
        "eagle3": lambda: d.eagle3_dialects(d.eagle3(16), 16)["safeailab"][::-1],
        "medusa": lambda: (d.medusa(2, d.VD) | {"token_map": d.IDS}, {"model_type": "medusa"}),
    }[kind]()
    head = load_head(d.write(tmp_path / "first", config, arrays), target())
    if (layout == "vllm") != (kind == "medusa"):
        with pytest.raises(UsageError, match=f'heads of {kind} have the layouts .*, not "{layout}"'):
            save_head(tmp_path / "second", head, layout=layout)
        return
    save_head(tmp_path / "second", head, layout=layout, target=target())
    again = read_head(tmp_path / "second", target())
    assert again.head.head is head.head and again.dialect == layout
    jax.tree.map(np.testing.assert_array_equal, again.head.params, head.params)


def test_a_layout_without_words_for_a_head_is_refused(tmp_path):
    head = load_head(written(tmp_path, norm_output=True), target())
    with pytest.raises(UsageError, match="layout safeailab has no norm_output; save the head as speculators"):
        save_head(tmp_path / "out", head, layout="safeailab")


@pytest.mark.parametrize(
    "rope", [{"type": "mrope"}, {"rope_type": "default", "type": "mrope"}, {"rope_type": "default"}]
)
def test_a_head_of_a_model_for_images_reads_text(rope, tmp_path):
    """The three positions of a token of text are equal, so the sections of its rotation are those of one position."""
    layers = d.layers(8, rope_scaling=rope | {"mrope_section": [1, 1, 2]})
    sections = load_head(written(tmp_path / "sections", transformer_layer_config=layers), target())
    plain = load_head(written(tmp_path / "plain", transformer_layer_config=d.layers(8)), target())
    same(logits(sections), logits(plain))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_token_map_of_fr_spec(kind, tmp_path):
    """The map has the target's ids. Other ids are not drafted, and mapped ones keep their logits."""
    torch = pytest.importorskip("torch")
    torch.save([20, 3, 50], tmp_path / "freq_3.pt")
    arrays, config = (d.eagle(), d.layers(8)) if kind == "eagle" else (d.eagle3(vocab=d.V), d.layers(8))
    folder = d.write(tmp_path / "head", config, arrays)
    complete, some = (
        logits(load_head(folder, target())),
        logits(load_head(folder, target(), token_map=tmp_path / "freq_3.pt")),
    )
    expected = np.full_like(complete, -np.inf)
    expected[:, [3, 20, 50]] = complete[:, [3, 20, 50]]
    same(some, expected)


MISFITS = {
    "width": (lambda: {}, shapes_of_target(width=16), r"hidden_size 32, and the width of the target tiny is 16"),
    "vocabulary": (
        lambda: {}, shapes_of_target(vocab_size=65), r"vocab_size 64, and the vocabulary of the target tiny has 65"
    ),
    "layers": (
        lambda: {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, target(),
        r"stream 9 \(eagle_aux_hidden_state_layer_ids\), and tiny has 6 layers",
    ),
    "number of streams": (
        lambda: {"eagle_aux_hidden_state_layer_ids": [2, 3]}, target(),
        r"fc.weight for 3 of the target's streams, and eagle_aux_hidden_state_layer_ids names 2",
    ),
    "family": (
        lambda: {}, shapes_of_target(qk_norm=True),
        r'is for "LlamaForCausalLM", and the target tiny is of the family qwen3'
    ),
    "draft vocabulary": (
        lambda: {"draft_vocab_size": 32}, target(), r"draft_vocab_size 32, and its lm_head.weight .* 16"
    ),
    "layers of the head": (
        lambda: {"transformer_layer_config": d.layers(8, num_hidden_layers=4)}, target(),
        "num_hidden_layers 4, and the file has 1 layers",
    ),
    "heads": (
        lambda: {"transformer_layer_config": d.layers(8, num_attention_heads=8)}, target(),
        r"wrongly shaped .*k_proj.weight is \[16, 64\], not \[8, 64\]",
    ),
    "a huge number": (
        lambda: {"transformer_layer_config": d.layers(8, hidden_size=10**12)}, target(), "hidden_size 1000000000000",
    ),
    "another kind": (lambda: {"speculators_model_type": "independent"}, target(), '"independent", which specjax'),
    "scaling of positions": (
        lambda: {"transformer_layer_config": d.layers(8, rope_scaling={"rope_type": "dynamic"})}, target(), "dynamic",
    ),
    "quantised": (lambda: {"quantization_config": {"bits": 4}}, target(), "quantised"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named_with_both_numbers(name, tmp_path):
    changes, of, message = MISFITS[name]
    with pytest.raises(UsageError, match=message):
        load_head(written(tmp_path, **changes()), of)


TENSORS = {
    "missing": (lambda a: a.pop("fc.weight"), "no tensor fc.weight"),
    "missing too": (lambda a: a.pop("layers.0.mlp.up_proj.weight"), r"1 missing \(layers.0.mlp.up_proj.weight\)"),
    "unexpected": (lambda a: a.update(extra=np.zeros(3, np.float32)), r"1 unexpected \(extra\)"),
    "no head": (lambda a: a.pop("lm_head.weight"), "no lm_head.weight, but drafts 16 of the target's 64 ids"),
    "no map": (lambda a: (a.pop("d2t"), a.pop("t2d")), "drafts 16 of the target's 64 ids and has no map of them"),
    "ids for differences": (lambda a: a.update(d2t=d.IDS + 40), r"d2t that leads to id 87, and the target has 64"),
    "an id twice": (lambda a: a.update(d2t=np.append(a["d2t"][:-1], a["d2t"][-2] - 1)), "leads to id 31 2 times"),
    "another map": (lambda a: a.update(d2t=a["d2t"][:-1]), r"d2t of shape \[15\]"),
    "twice": (lambda a: a.update({"midlayer.hidden_norm.weight": a["norm.weight"]}), "which are one tensor"),
    "joined of other sizes": (
        lambda a: a.update({"layers.0.self_attn.qkv_proj.weight": np.zeros((40, 64), np.float32)}),
        "with 40 rows, but config.json implies 32",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_not_as_they_should_be_are_named(name, tmp_path):
    change, message = TENSORS[name]
    arrays = d.eagle3()
    change(arrays)
    config = d.layers(8) | {"draft_vocab_size": d.VD}
    if name == "twice":
        arrays = {key.replace("layers.0", "midlayer") if "q_proj" in key else key: x for key, x in arrays.items()}
        config["architectures"] = ["LlamaForCausalLMEagle3"]
    with pytest.raises(UsageError, match=message):
        load_head(d.write(tmp_path, config, arrays), target())


class Runs:
    """A pickle that would execute code."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_in_a_pickle_is_run(tmp_path):
    torch = pytest.importorskip("torch")
    folder = d.write(tmp_path / "head", {"medusa_num_heads": 2}, {})
    (folder / "model.safetensors").unlink()
    torch.save({"0.0.linear.weight": torch.zeros(32, 32), "x": Runs(tmp_path / "ran")}, folder / "medusa_lm_head.pt")
    with pytest.raises(UsageError, match=r"contains code .*mkdir.*, which specjax never runs"):
        load_head(folder, target())
    torch.save([1, Runs(tmp_path / "ran")], tmp_path / "freq.pt")
    with pytest.raises(UsageError, match="contains code"):
        load_head(d.write(tmp_path / "eagle", d.layers(8), d.eagle()), target(), token_map=tmp_path / "freq.pt")
    assert not (tmp_path / "ran").exists()


def test_a_token_map_that_does_not_fit(tmp_path):
    torch = pytest.importorskip("torch")
    folder = d.write(tmp_path / "eagle", d.layers(8), d.eagle())
    for contents, message in (
        ([1, 64], "leads to id 64, and the target has 64"),
        ([1, 1], "leads to id 1 2 times"),
        ([True, 2.5], "contains no list of whole numbers"),
        ({"a": torch.zeros(2)}, "contains no list of whole numbers"),
    ):
        torch.save(contents, tmp_path / "freq.pt")
        with pytest.raises(UsageError, match=message):
            load_head(folder, target(), token_map=tmp_path / "freq.pt")
    torch.save(torch.tensor([5, 9]), tmp_path / "freq.pt")
    assert load_head(folder, target(), token_map=tmp_path / "freq.pt").head.config.draft_vocab_size == 2


def test_what_is_no_head_is_told_from_one(tmp_path):
    assert recognise(tmp_path / "nothing") is None and recognise("target") is None
    config = d.layers(8) | {"architectures": ["LlamaForCausalLM"]}
    complete = d.write(tmp_path / "model", config, d.arrays_of({"model.embed_tokens.weight": (d.V, d.D)}))
    assert recognise(complete) is None
    with pytest.raises(UsageError, match="is not a draft head of a known kind"):
        load_head(complete, target())
    (complete / "config.json").write_text(json.dumps([1]))
    with pytest.raises(UsageError, match="is not a JSON object"):
        load_head(complete, target())


def shifting(vocab: int = 7, shift: int = 3) -> tuple[Target, np.ndarray]:
    """Return a target with a fixed next token for each token, and the map that shifts its streams by one token."""
    following = (np.arange(vocab) + shift) % vocab
    rows = np.full((vocab, vocab), 1e-6, np.float32)
    rows[np.arange(vocab), following] = 1.0
    move = np.zeros((vocab, vocab), np.float32)
    move[following, np.arange(vocab)] = 1.0
    return markov(rows), move


def knowing(move: np.ndarray, **changes) -> LoadedHead:
    """Return an EAGLE-3 head with a layer that adds zero: it predicts from the stream of a token."""
    vocab = len(move)
    layer = LlamaConfig(vocab, vocab, 1, 2, 1, 8, 8)
    config = Eagle3Config(**{"layer": layer, "taps": (2,), "target_width": vocab, "vocab_size": vocab} | changes)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_params(Eagle3, config))
    params["fc"]["weight"], params["norm"]["weight"] = move, np.ones(vocab, np.float32)
    size = config.layer.vocab_size
    params["head"]["weight"] = np.eye(vocab, dtype=np.float32)[:size]
    if config.is_trimmed:
        params["vocabulary"]["place"] = np.minimum(np.arange(vocab, dtype=np.int32), size)
    return LoadedHead(DraftHead(eagle3_head(config), params), "speculators", {}, (), (), 0, (), None, None)


TEXT = [(3 * i) % 7 for i in range(15)]  # its own


def test_a_head_that_is_read_well_agrees_with_its_target():
    of, move = shifting()
    assert check_head(knowing(move), of, TEXT)[:3] == (1.0, len(TEXT) - 1, None)


def test_the_likeliest_reason_of_a_low_agreement_is_the_reading_that_mends_it():
    of, move = shifting()
    at_embedding = check_head(knowing(move, taps=(0,)), of, TEXT)
    assert at_embedding.agreement < 0.2 and "its layer ids count outputs of layers; as streams" in at_embedding.reason
    assert "[1] (with --head-set taps=1 they agree at 100%, " in at_embedding.reason
    nothing = knowing(np.zeros_like(move))
    assert "another target or fine-tune" in check_head(nothing, of, TEXT).reason
    of_another = nothing._replace(trained_for="org/Other-8B")
    assert f"trained for org/Other-8B, and the target is {of.model.name}" in check_head(of_another, of, TEXT).reason


def all_of(kind, folder):
    """Return (head, config, tensors) of a tiny random head of speculators."""
    head = tiny_head(kind, target())
    save_head(folder, head, target=target())
    return head, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def same_head(loaded, expected):
    def shapes(config):
        """Return the shapes without the target's own parts."""
        return replace(config, layer=replace(config.layer, tied=False, name="", cache_bits=False))

    assert loaded.head.kind == expected.head.kind
    assert shapes(loaded.head.config) == shapes(expected.head.config)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)


def flat(config, **changes):
    """Return a config without nested objects, as most writers save it."""
    config = config | config["transformer_layer_config"] | changes
    return {key: value for key, value in config.items() if not key.startswith(("speculators", "transformer_layer"))}


@pytest.mark.parametrize("kind", ["p_eagle", "dflash", "dflash2", "dspark"])
def test_drafters_of_blocks_are_read_back_bit_by_bit(kind, tmp_path):
    head, config, _ = all_of(kind, tmp_path)
    assert recognise(tmp_path) == (kind, "speculators")
    loaded = read_head(tmp_path, target())
    same_head(loaded.head, head)
    assert config["speculators_model_type"] == {"p_eagle": "peagle"}.get(kind, kind)


def test_block_drafters_of_other_writers(tmp_path):
    ids = lambda config: [tap - 1 for tap in config["aux_hidden_state_layer_ids"]]
    for kind, writer in (("dflash", "zlab"), ("dflash2", "zlab"), ("dspark", "deepspec"), ("dspark", "modelopt")):
        head, config, arrays = all_of(kind, tmp_path / f"{kind} of {writer}")
        config = flat(config, target_layer_ids=ids(config), aux_hidden_state_layer_ids=None)
        if writer == "zlab":
            inner = "mask_token_id", "target_layer_ids", "conv_kernel_size", "selector_top_k", "block_size"
            inside = {name: config.pop(name) for name in inner if name in config}
            config |= {"dflash_config": inside, "sample_from_anchor": None}
        if writer == "deepspec":
            config["sample_from_anchor"] = None  # it always does
        if writer == "modelopt":
            config |= {"sample_from_anchor": None, "shift_label": True}
            arrays = d.renamed(arrays, ("markov_head.", ""), ("confidence_head.proj", "confidence_proj"))
        folder = d.write(tmp_path / f"{kind} again", config, arrays)
        assert recognise(folder) == (kind, writer)
        same_head(load_head(folder, target()), head)


def test_domino_of_specforge(tmp_path):
    head = tiny_head("domino", target())
    config = {
        **describe_layers(head.head.config.layer), "projector_type": "domino", "block_size": 4, "shift_label": True,
        "dflash_config": {
            "mask_token_id": d.V - 1, "target_layer_ids": [tap - 1 for tap in head.head.taps],
            "pure_draft_prefix_len": 1,
        },
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3,
    }  # fmt: skip
    arrays = arrays_by_table(head, dflash.TABLE)
    folder = d.write(
        tmp_path, config, {f"logit_head.{x}" if "_proj." in x and "emb" in x else x: arrays[x] for x in arrays}
    )
    assert recognise(folder) == ("domino", "zlab")
    same_head(load_head(folder, target()), head)
    with pytest.raises(UsageError, match="the layout speculators has no Domino head"):
        save_head(tmp_path / "out", head, layout="speculators")


def test_block_drafters_that_do_not_fit(tmp_path):
    _, config, arrays = all_of("dspark", tmp_path / "good")
    for number, (changes, message) in enumerate(
        (
            ({"mask_token_id": 64}, "mask_token_id 63, and the target has 64 ids"),
            ({"mask_token_id": None}, "lacks the field mask_token_id"),
            ({"markov_head_type": "gated"}, 'markov_head_type "gated", and the file has the tensors of rnn'),
            (
                {"aux_hidden_state_layer_ids": [1]},
                "for 2 of the target's streams, and aux_hidden_state_layer_ids names 1",
            ),
            ({"block_size": 10**9}, "block_size 1000000000, which must be"),
        )
    ):
        with pytest.raises(UsageError, match=message):
            load_head(d.write(tmp_path / str(number), config | changes, arrays), target())


def arrays_by_table(head, table):
    """Return the tensors of a head by the names of its format's table."""
    path = lambda keys: ".".join(str(entry.key) for entry in keys)
    leaves = jax.tree_util.tree_flatten_with_path(head.params)[0]
    return {stored_name(table, path(keys)): np.asarray(x) for keys, x in leaves}


def test_hydra_with_a_prefix_layer_and_without(tmp_path):
    layer = replace(target().model.config, num_layers=1)
    for number, prefix in enumerate((None, layer)):
        config = HydraConfig(d.D, d.V, 3, 2, prefix)
        head = init_head("hydra", config, jax.random.key(number))
        arrays = arrays_by_table(head, hydra.TABLE)
        if prefix is not None:  # the number of a module counts the dropout before it
            odd = lambda match: f"{match[1]}.{2 * int(match[2]) + 1}."
            arrays = {re.sub(r"^(hydra_mlp\.\d+)\.(\d+)\.", odd, name): x for name, x in arrays.items()}
            arrays = {re.sub(r"^(hydra_lm_head\.\d+)\.", r"\1.1.", name): x for name, x in arrays.items()}
        outputs = {"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "prefix-mlp" if prefix else "mlp"}
        folder = d.write(tmp_path / str(number), outputs, arrays, "hydra_lm_head.pt")
        assert recognise(folder) == ("hydra", "authors")
        loaded = load_head(folder, target())
        assert replace(loaded.head.config, layer=None) == replace(config, layer=None)
        jax.tree.map(np.testing.assert_array_equal, loaded.params, head.params)
    (folder / "config.json").write_text(json.dumps(outputs | {"hydra_head_arch": "cross-attn"}))
    with pytest.raises(UsageError, match='hydra_head_arch "cross-attn", and the file is of prefix-mlp'):
        load_head(folder, target())


def test_recurrent_speculators(tmp_path):
    for tied in (False, True):
        config = MlpSpeculatorConfig(d.D, 16, d.V, 3, tied=tied, scaled=True)
        head = init_head("mlp_speculator", config, jax.random.key(1))
        arrays = {f"speculator.{name}": x for name, x in arrays_by_table(head, mlp_speculator.TABLE).items()}
        if tied:
            arrays |= {f"speculator.{part}.1.weight": arrays[f"speculator.{part}.0.weight"] for part in ("emb", "head")}
        outputs = {"model_type": "mlp_speculator", "n_predict": 3, "vocab_size": d.V, "emb_dim": d.D, "inner_dim": 16}
        folder = d.write(tmp_path / str(tied), outputs | {"tie_weights": tied, "scale_input": True}, arrays)
        assert recognise(folder) == ("mlp_speculator", "ibm")
        loaded = read_head(folder, target())
        assert loaded.head.head.config == config and len(loaded.unused) == 2 * tied
        jax.tree.map(np.testing.assert_array_equal, loaded.head.params, head.params)
    config = ReDrafterConfig(d.D, 40, d.V, num_blocks=2)
    head = init_head("redrafter", config, jax.random.key(1))
    arrays = d.renamed(arrays_by_table(head, redrafter.TABLE), ("head.weight", "lm_head.2.weight"))
    outputs = {"model_type": "recurrent_drafting_drafter", "hidden_size": d.D, "exit_dim": 40, "num_draft_layers": 2}
    loaded = load_head(d.write(tmp_path / "redrafter", outputs, arrays), target())
    assert loaded.head.config == config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, head.params)


def test_prompts_of_ppd(tmp_path):
    arrays = d.arrays_of({"prompt_embeddings": (6, d.D)})
    outputs = {
        "peft_type": "PROMPT_TUNING", "base_model_name_or_path": "target", "num_virtual_tokens": 6,
        "num_special_tokens": 3, "virtual_tokens_per_special_token": 2, "vt_attention_type": "ensemble",
        "aggregation_type": "mean", "num_exits": 1,
    }  # fmt: skip

    def adapter(name: str, arrays=arrays, **changes):
        folder = d.write(tmp_path / name, outputs | changes, arrays, f"adapter_model.{name.partition('.')[2]}")
        return (folder / "config.json").rename(folder / "adapter_config.json").parent

    for name in ("one.bin", "two.safetensors"):
        folder = adapter(name)
        assert recognise(folder) == ("ppd", "peft")
        loaded = read_head(folder, target())
        assert loaded.head.head.config == PpdConfig(d.D, 3, 2) and loaded.trained_for == "target"
        prompts = loaded.head.head.soft_prompts(loaded.head.params)
        np.testing.assert_array_equal(prompts[2, 1], arrays["prompt_embeddings"][5])
        np.testing.assert_array_equal(np.reshape(prompts, (6, d.D)), arrays["prompt_embeddings"])
    ((reason, other, _),) = ppd.variants(loaded.head, d.L)
    assert "one copy" in reason
    np.testing.assert_array_equal(other.head.soft_prompts(other.params)[2, 1], arrays["prompt_embeddings"][1 * 3 + 2])
    for number, (changes, words) in enumerate((
        ({"num_special_tokens": 2}, "has 6 prompts, and .* has 2 num_special_tokens of 2"),
        ({"num_special_tokens": None}, "has no num_special_tokens: its prompts were not trained to draft"),
        ({"vt_attention_type": "decoder"}, 'vt_attention_type "decoder", and for 2 copies ensemble is supported'),
        ({"aggregation_type": "weighted"}, 'aggregation_type "weighted", and only mean'),
        ({"num_exits": 3}, r"num_exits 3, and only the target's last layer is supported \(1\)"),
        ({"use_custom_lm_head": True}, "sets use_custom_lm_head: a head of its own next to the prompts"),
    )):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            load_head(adapter(f"{number}.safetensors", **changes), target())
    wider = adapter("wider.safetensors", d.arrays_of({"prompt_embeddings": (6, 40)}))
    with pytest.raises(UsageError, match=f"has prompts of width 40, and the width of the target tiny is {d.D}"):
        load_head(wider, target())


def test_fspad(tmp_path):
    config = EagleConfig(layer_of(target()), sampler=True, split=True)
    head = init_head("eagle", config, jax.random.key(1))
    save_head(tmp_path, head, layout="fspad")
    assert {"fc.fc.weight", "fc.mlp.up_proj.weight"} <= set(load_file(tmp_path / "model.safetensors"))
    assert recognise(tmp_path) == ("eagle", "fspad")
    loaded = load_head(tmp_path, target())
    assert loaded.head.config.sampler and loaded.head.config.split
    jax.tree.map(np.testing.assert_array_equal, loaded.params, head.params)
    with pytest.raises(UsageError, match="the head has a sampler, which the layout safeailab does not fit"):
        save_head(tmp_path, head, layout="safeailab")


@pytest.mark.parametrize(
    "kind, layout, inner", [("dflash", "zlab", "dflash_config"), ("eagle3", "specforge", "eagle_config")]
)
def test_fields_that_no_format_reads_are_named(kind, layout, inner, tmp_path):
    """They are named once, also in nested objects and if the search for a format looked at them."""
    if kind == "dflash":
        save_head(tmp_path, tiny_head("dflash", target()), layout=layout)
        config, weights = json.loads((tmp_path / "config.json").read_text()), None
    else:
        config, weights = d.eagle3_dialects(d.eagle3())[layout]
        d.write(tmp_path, config, weights)
    assert read_head(tmp_path, target()).unread == ()
    config |= {"residual_multiplier": 2.0, "rope_scaling": {"rope_type": "default", "beta_fast": 32.0}}
    config[inner] = config[inner] | {"attention_sinks": True, "use_cache": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(CheckpointWarning, match="3 fields that are not read") as caught:
        load_head(tmp_path, target())
    (message,) = {str(warning.message) for warning in caught}
    names = message.rpartition(": ")[2].split(", ")
    assert sorted(names) == [f"{inner}.attention_sinks", "residual_multiplier", "rope_scaling.beta_fast"]
