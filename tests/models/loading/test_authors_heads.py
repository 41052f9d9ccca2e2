"""Heads with their authors' tensor names, against the methods' equations in NumPy (float64)."""

from __future__ import annotations

import json
import math
import shutil

import dialects as d
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_oracles import (
    DRAFT,
    PAIRS,
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
from head_runs import draft
from safetensors.numpy import load_file

from specjax import UsageError
from specjax.models.heads.agreement import agreement, read_text
from specjax.models.heads.clover import CloverConfig
from specjax.models.heads.contract import FeaturePairs
from specjax.models.heads.kinds import init_head
from specjax.models.loading.heads import kangaroo, load_head, read_head, recognise, save_head
from specjax.types import Context

HD = d.D // d.H


def double(arrays: dict) -> dict:
    return {name: value.astype(np.float64) for name, value in arrays.items()}


def applied(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer(x, w, prefix):
    x = x + attended(norm(x, w[f"{prefix}.input_layernorm.weight"]), w, f"{prefix}.self_attn", HD)
    return x + fed(norm(x, w[f"{prefix}.post_attention_layernorm.weight"]), w, f"{prefix}.mlp")


FEATURES = STREAMS[d.L].astype(np.float64)


# --------------------------------------------------------------------------------------------------------- Kangaroo


@jax.jit
def streams_of(of, tokens):
    """Return the target's stream after two layers, and its cache of all tokens but the last two."""
    size = tokens.shape[1]
    positions, mask = jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool))
    cache = of.model.init_cache(of.params, None, 1, 16)
    output, pending = of.model.forward(of.params, tokens, cache, positions=positions, mask=mask, taps=(2,))
    return output.taps[0], of.model.commit(cache, pending, positions, jnp.array([PAIRS]))


@jax.jit
def adapted(head, of, features, cache):
    text = jnp.asarray([[1, *TOKENS]])
    context = Context(text, jnp.asarray([PAIRS + 1]), target=of, cache=cache)
    memory = head.head.init_memory(head.params, context, 1, 16)
    pairs = FeaturePairs(features, text[:, 1:], jnp.asarray([PAIRS]))
    memory = head.head.read(head.params, memory, pairs, context)
    return draft(head.head, head.params, memory, context, jnp.asarray([[DRAFT]]))[0]


def test_kangaroo(tmp_path):
    arrays, config = d.kangaroo(), d.layers(8)
    small = target(num_layers=2)
    h, cache = streams_of(small, jnp.asarray([[1, *TOKENS, DRAFT]]))
    w, x = double(arrays), np.asarray(h[0], np.float64)
    a = x + attended(norm(x, w["layers.0.input_layernorm.weight"]), w, "layers.0.self_attn", HD)
    expected = norm(a, w["norm.weight"])[-2:] @ params_of("head", small).T
    for number, (tensors, name) in enumerate(((arrays, "pytorch_model.bin"), (d.fused(arrays), "model.safetensors"))):
        folder = d.write(tmp_path / str(number), config, tensors, name)
        assert recognise(folder) == ("kangaroo", "authors")
        loaded = read_head(folder, small)
        assert loaded.head.head.config.exit_layer == 2 and "assumed the authors' 2" in loaded.notes[0]
        same(np.asarray(adapted(loaded.head, small, h[:, :PAIRS], cache)), expected)
    first = read_head(d.write(tmp_path / "first", config | {"exit_layer": 1}, arrays), small)
    assert first.head.head.taps == (1,) and not first.notes
    with pytest.raises(UsageError, match="has exit_layer 7, and tiny has 2 layers"):
        load_head(d.write(tmp_path / "deep", config | {"exit_layer": 7}, arrays), small)
    with pytest.raises(UsageError, match="the default exit_layer 2, and tiny has 1 layers"):
        load_head(folder, shapes_of_target(num_layers=1))


def test_the_self_check_of_kangaroo_runs_the_targets_own_layers(tmp_path):
    """After all layers, an adapter that adds zero has the target's outputs; it was read with one layer."""
    small, arrays = target(num_layers=2), d.kangaroo()
    arrays |= {
        "layers.0.self_attn.o_proj.weight": 0 * arrays["layers.0.self_attn.o_proj.weight"],
        "norm.weight": np.asarray(small.params["norm"]["weight"]),
    }
    head = load_head(d.write(tmp_path, d.layers(8) | {"exit_layer": 1}, arrays), small)
    [(reason, second, setting)] = kangaroo.variants(head, 2)
    assert "after layer 2 of the target, not after 1" in reason and setting == "exit_layer=2"
    assert agreement(small, second, read_text(small, list(range(3, 23)), [second])) == (1.0,) * 4
    assert load_head(tmp_path, small, settings={"exit_layer": "2"}).head is second.head


# ----------------------------------------------------------------------------------------------------------- Clover


def clover_oracle(arrays):
    w = double(arrays)

    def gated(name, h, y):
        heads = lambda x: x.reshape(*x.shape[:-1], d.H, -1)
        q, k, v = (
            heads(applied(w, f"{name}.{part}", x))
            for part, x in (("q", norm(h, w[f"{name}.input_layernorm.weight"])), ("k", y), ("v", y))
        )
        cosine = (q * k).sum(-1) / np.linalg.norm(q, axis=-1) / np.linalg.norm(k, axis=-1)
        return h + (cosine[..., None] * v).reshape(h.shape)

    table, outputs = w["clover_embed_tokens.weight"], lambda out: norm(out, w["clover_head_norm.weight"])
    x = gated("clover_head_mlp_rnn", FEATURES, table[TOKENS])
    for i in range(2):
        x = layer(x, w, f"layers.{i}")
    h = norm(x[-1], w["clover_norm.weight"])
    first = applied(w, "clover_head_mlp", h)
    h = gated("clover_head_mlp_rnn2", h, table[DRAFT])
    second = applied(w, "clover_head_mlp2", np.concatenate([h, table[DRAFT]]))
    return np.stack([outputs(first), outputs(second)]) @ params_of("head").T


def test_clover_2(tmp_path):
    arrays = d.clover()
    config = d.layers(8, num_hidden_layers=6) | {"clover": {"num_heads": 5, "num_layers": 2}}  # the target's layers
    folder = d.write(tmp_path / "whole", config, arrays)
    assert recognise(folder) == ("clover", "authors")
    loaded = read_head(folder, target())
    assert loaded.flags == {"num_layers": 2, "num_heads": 5, "embeds": True} and not loaded.notes
    same(logits(loaded.head), clover_oracle(arrays))

    frozen = {"clover_embed_tokens.weight": np.asarray(target().params["head"]["weight"])}  # as new ones are
    without = {name: value for name, value in arrays.items() if name not in frozen}
    loaded = read_head(d.write(tmp_path / "without", config, without), target())
    assert "rows of the target's output layer" in loaded.notes[0]
    same(logits(loaded.head), clover_oracle(arrays | frozen))

    with pytest.raises(UsageError, match=r"without 2\) has no published layout"):
        of_one = CloverConfig(loaded.head.head.config.layer, (d.L,), embeds=False, version=1)
        save_head(tmp_path / "out", init_head("clover", of_one, jax.random.key(0)))
    with pytest.raises(UsageError, match=r"2 missing \(clover_head_mlp2.bias"):
        missing = {name: x for name, x in arrays.items() if not name.startswith("clover_head_mlp2.")}
        load_head(d.write(tmp_path / "missing", config, missing), target())


# ---------------------------------------------------------------------------------------------------------- Chimera


def chimera_oracle(files, table):
    tri, one, heads = (double(files[name]) for name in ("trimlp", "fast_layer1", "chimera_head"))
    text = [1, *TOKENS, DRAFT]

    def trigram(i):
        c = table[text[i - 2 : i + 1]].reshape(-1)
        return (c + silu(applied(tri, "0.linear", c))) @ tri["1.weight"].T

    x, outputs = FEATURES, []
    for i in range(2):
        y = layer(np.concatenate([x, trigram(PAIRS + i)[None]]), one, "0")[-1:]
        outputs.append(np.concatenate([FEATURES[-1], y[0]]) @ heads[f"{i}.0.weight"].T)
        x = np.concatenate([x, y])
    return np.stack(outputs)


def test_chimera_in_three_files_and_in_one(tmp_path):
    files = d.chimera()
    like = target(num_layers=1, num_heads=d.H, num_kv_heads=d.KV, mlp_width=d.F)  # whose layers the authors' is like
    outputs = {"chimera_num_heads": 2, "chimera_num_layers": 1, "base_model_name_or_path": "org/target"}
    folder = tmp_path / "three"
    for name, arrays in files.items():
        d.write(tmp_path / name, outputs, arrays, f"{name}.pt")
        folder.mkdir(exist_ok=True)
        shutil.copy(tmp_path / name / f"{name}.pt", folder)
    (folder / "config.json").write_text(json.dumps(outputs))
    assert recognise(folder) == ("chimera", "authors")
    loaded = read_head(folder, like)
    assert loaded.trained_for == "org/target" and loaded.flags == {"num_heads": 2} and not loaded.notes
    same(logits(loaded.head, like), chimera_oracle(files, params_of("embed", like)))
    full = {f"{file}.{name}": x for file, arrays in files.items() for name, x in arrays.items()}
    one = d.write(tmp_path / "one", d.layers(8) | {"chimera_num_heads": 1}, full)
    again = read_head(one, target())
    assert "lists 1 heads, but the file has 2" in again.notes[0]
    jax.tree.map(np.testing.assert_array_equal, again.head.params, loaded.head.params)
    with pytest.raises(UsageError, match=r"heads of a vocabulary of 64, and the target tiny has 65"):
        load_head(one, shapes_of_target(vocab_size=65))
    with pytest.raises(UsageError, match=r"wrongly shaped .*0.self_attn.k_proj.weight is \[16, 32\], not \[8, 32\]"):
        load_head(folder, target())  # another layer than the target's


# ------------------------------------------------------------------------------------------------------- MLPs, RNNs


def mlp_oracle(w, features, *, centred: bool, eps: float):
    """Compute the logits with IBM's names without `speculator.`, for two heads."""
    gelu, inner = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2)))), 16
    state_weight = 0.5**0.25
    token_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    state, outputs = features[-1], []
    for i, token in enumerate((TOKENS[-1], DRAFT)):
        x = w[f"proj.{i}.weight"] @ state + token_weight / state_weight * w[f"emb.{i}.weight"][token]
        x = x - x.mean() if centred else x
        state = gelu(x / np.sqrt((x * x).mean() + eps) * w[f"ln.{i}.weight"] + w[f"ln.{i}.bias"])
        outputs.append(w[f"head.{i}.weight"] @ state)
    return np.stack(outputs)


def test_mlp_speculators_by_ibm_and_by_speculators(tmp_path):
    arrays = d.mlp_speculator()
    plain = d.renamed(double(arrays), ("speculator.", ""))
    ibm = {"n_predict": 2, "vocab_size": d.V, "emb_dim": d.D, "inner_dim": 16}
    loaded = load_head(d.write(tmp_path / "ibm", ibm, arrays), target())
    same(logits(loaded), mlp_oracle(plain, FEATURES, centred=False, eps=1e-6))

    older = d.renamed(
        arrays, ("speculator.", ""), ("emb.", "emb_layers."), ("proj.", "proj_layers."), ("ln.", "layernorms.")
    )
    outputs = d.of_speculators("mlp") | {
        "transformer_layer_config": None, "hidden_size": d.D, "intermediate_size": 16, "vocab_size": d.V,
        "num_layers": 2, "tie_weights": False,
    }  # fmt: skip
    folder = d.write(tmp_path / "speculators", outputs, older)
    assert recognise(folder) == ("mlp_speculator", "speculators")
    loaded = read_head(folder, target())
    assert loaded.flags["taps"] == (d.L,), "the stream before the target's final norm"
    same(logits(loaded.head), mlp_oracle(plain, FEATURES, centred=True, eps=1e-5))
    normed = d.write(tmp_path / "normed", outputs | {"inputs_hidden_states_normalized": True}, older)
    assert read_head(normed, target()).flags["taps"] == ()


def test_hydra_and_redrafter(tmp_path):
    arrays, table = d.hydra(), params_of("embed")
    w, c, expected = double(arrays), FEATURES[-1], []
    for i, token in enumerate((TOKENS[-1], DRAFT)):
        c = np.concatenate([c, table[token]])
        z = applied(w, f"hydra_mlp.{i}.0.res_connection", c) + silu(applied(w, f"hydra_mlp.{i}.0.linear", c))
        expected.append(applied(w, f"hydra_lm_head.{i}", z + silu(applied(w, f"hydra_mlp.{i}.1.linear", z))))
    outputs = {"hydra_num_heads": 2, "hydra_num_layers": 2, "hydra_head_arch": "mlp"}
    same(
        logits(load_head(d.write(tmp_path / "hydra", outputs, arrays, "hydra_lm_head.pt"), target())),
        np.stack(expected),
    )

    arrays = d.redrafter()
    w, state, expected = double(arrays), np.zeros(d.D), []
    for token in (TOKENS[-1], DRAFT):
        state = silu(w["rnn_w.weight"] @ table[token] + applied(w, "rnn_u", state))
        z = applied(w, "input_proj", np.concatenate([FEATURES[-1], state]))
        for j in range(2):
            z = z + silu(applied(w, f"lm_head.{j}.linear", z))
        expected.append(w["lm_head.2.weight"] @ z)
    outputs = {"model_type": "recurrent_drafting_drafter", "hidden_size": d.D, "exit_dim": 40, "num_draft_layers": 2}
    same(logits(load_head(d.write(tmp_path / "redrafter", outputs, arrays), target())), np.stack(expected))


# ------------------------------------------------------------------------------------------------ written and refused


@pytest.fixture
def written(tmp_path):
    """Return a function `(kind) -> (folder with a head, its tensors by name)`."""

    def write(kind):
        arrays = {"kangaroo": d.kangaroo, "clover": d.clover, "chimera": d.chimera}[kind]()
        config = d.layers(8) | {"chimera_num_heads": 2} if kind == "chimera" else d.layers(8)
        if kind == "chimera":
            arrays = {f"{file}.{name}": x for file, tensors in arrays.items() for name, x in tensors.items()}
        return d.write(tmp_path / kind, config, arrays), arrays

    return write


@pytest.mark.parametrize("kind", ["kangaroo", "clover", "chimera"])
def test_what_is_saved_is_read_back_bit_by_bit(kind, written, tmp_path):
    folder, arrays = written(kind)
    head = load_head(folder, target())
    save_head(tmp_path / "again", head, target=target())
    assert recognise(tmp_path / "again") == (kind, "authors")
    again = load_head(tmp_path / "again", target())
    assert again.head is head.head
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(saved[name], value)


@pytest.mark.parametrize("kind", ["kangaroo", "clover", "chimera"])
def test_heads_of_another_target_are_refused(kind, written, tmp_path):
    folder, _ = written(kind)
    with pytest.raises(UsageError, match=r"(hidden_size|heads of width) 32, and the width of the target tiny is 16"):
        load_head(folder, shapes_of_target(width=16))
    with pytest.raises(UsageError, match=r"of (a )?(the )?vocabulary .*65|vocab_size 64, and the vocabulary .* 65"):
        load_head(folder, shapes_of_target(vocab_size=65))
    torch = pytest.importorskip("torch")
    torch.save([3, 5], tmp_path / "freq.pt")
    with pytest.raises(UsageError, match=r"which takes? no token map; leave it out"):
        load_head(folder, target(), token_map=tmp_path / "freq.pt")


def test_heads_by_nemo_automodel_and_on_top_of_model_optimizers(tmp_path):
    """The first file is P-EAGLE below `model.`, the second EAGLE-3 with unused Medusa heads."""
    shapes = {"mask_hidden": (1, 1, 3 * d.D)}
    arrays = d.eagle3() | d.arrays_of(shapes)
    above = {
        name if name.startswith(("lm_head", "d2t", "t2d")) else f"model.{name}": value for name, value in arrays.items()
    }
    config = d.layers(8) | {"draft_vocab_size": d.VD, "ptd_token_id": 5, "para_depths": 3}
    folder = d.write(tmp_path / "peagle", config, above)
    assert recognise(folder) == ("p_eagle", "automodel")
    loaded = read_head(folder, target())
    assert (loaded.flags["mask_token"], loaded.flags["depths"]) == (5, 3)
    np.testing.assert_array_equal(loaded.head.params["mask_hidden"], arrays["mask_hidden"].reshape(-1))

    config, arrays = d.eagle3_dialects(d.eagle3())["modelopt"]
    extra = d.arrays_of({"parallel_draft_heads.0.medusa_layers.0.linear.weight": (d.D, d.D)})
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    loaded = read_head(d.write(tmp_path / "modelopt", config, arrays | extra), target())
    assert loaded.unused == tuple(extra)
    scaling = loaded.head.head.config.layer.rope_scaling
    assert scaling.factor == 32 and scaling.amplitude == pytest.approx(1 + 0.1 * math.log(32))
    save_head(tmp_path / "again", loaded.head)
    assert load_head(tmp_path / "again", target()).head is loaded.head.head


def test_a_token_map_on_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    torch, requests = pytest.importorskip("torch"), {}
    torch.save([20, 3, 50], tmp_path / "freq_3.pt")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **kw: requests.update(kw, repo=repo) or str(tmp_path)
    )
    folder = d.write(tmp_path / "eagle", d.layers(8), d.eagle())
    head = load_head(folder, target(), token_map="org/maps/freq_3.pt")
    assert head.head.config.draft_vocab_size == 3
    assert requests == {"repo": "org/maps", "allow_patterns": ["freq_3.pt"]}
    with pytest.raises(UsageError, match=r"nothing\.pt"):
        load_head(folder, target(), token_map=tmp_path / "nothing.pt")
