"""Folders of diffusion language models in the published layouts: their settings and their logits."""

import json
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mixture_oracle
import numpy as np
import pytest

import specjax
from specjax import Denoiser, Target, UsageError
from specjax.errors import CheckpointWarning
from specjax.models import LlamaConfig
from specjax.models.loading import is_diffusion, read_model
from specjax.models.loading.families import denoisers
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.planning import make_workload
from specjax.training import init_denoiser, save_denoiser_model

MASK = 95
FULL = {"attention": "full", "block": None, "alignment": "same", "seeding": "all_masked"}
SHIFTED = FULL | {"alignment": "shifted"}
BLOCKS = FULL | {"attention": "block_causal", "block": 4}
OWN_CODE = {"AutoModelForCausalLM": "modeling_qwen2.Qwen2ForCausalLM"}
PUBLISHED = {
    "sdar": ("qwen3", {"block_size": 4}, BLOCKS, "<|MASK|>"),
    "Dream": ("qwen2", {"mask_token_id": MASK, "use_mrope": False}, SHIFTED, None),
    "Fast_dLLM_Qwen": (
        "qwen2", {"bd_size": 4, "conplemenrary_mask": True}, BLOCKS | {"alignment": "shifted",
        "seeding": "seed_and_mask"}, "|<MASK>|",
    ),
    "a2d-qwen3": ("qwen3", {}, FULL, "<|mask|>"),
    "qwen2": ("qwen2", {"mask_token_id": MASK, "auto_map": OWN_CODE}, SHIFTED, None),  # Open-dCoder
    "sdar_moe": ("qwen3_moe", {"block_size": 4, "architectures": ["SDARMoeForCausalLM"]}, BLOCKS, "<|MASK|>"),
    "lladamoe": (
        "qwen3_moe", {
            "architectures": ["LLaDAMoEModelLM"], "auto_map": {"AutoModel": "modeling_lladamoe.LLaDAMoEModelLM"},
            "num_experts": 8, "num_local_experts": None, "moe_intermediate_size": None, "expert_intermediate_size": 16,
            "dense_intermediate_size": 48,
            "intermediate_size": None, "moe_layer_freq": [1, 1], "qk_layernorm": True, "norm_topk_prob": None,
            "mlp_only_layers": None, "decoder_sparse_step": None, "head_dim": None, "clip_qkv": None,
            "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax", "partial_rotary_factor": 1,
            "routed_scaling_factor": 1, "router_num_group": None, "router_topk_group": None,
            "shared_expert_intermediate_size": None,
        }, FULL, "<|mask|>",
    ),
    "llada2_moe": (
        "glm4_moe", {
            "architectures": ["LLaDA2MoeModelLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM"}, "n_routed_experts": None,
            "num_experts": 8, "n_shared_experts": None, "num_shared_experts": 1, "score_function": "sigmoid",
            "router_dtype": "fp32", "use_bias": False, "use_qkv_bias": False, "max_window_layers": 20,
            "moe_router_enable_expert_bias": True, "norm_head": False, "norm_softmax": False, "use_rmsnorm": True,
            "block_size": 4, "attention_bias": None,
        }, BLOCKS, "<|mask|>",
    ),
    "llama": ("llama", {"architectures": ["StableDiffcoderForCausalLM"], "block_size": 4}, BLOCKS, "<[MASK_TOKEN]>"),
}  # fmt: skip


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SMALL = {
    "sdar_moe": EXPERTS | {"norm_topk_prob": True}, "lladamoe": EXPERTS | {"norm_topk_prob": False},
    "llada2_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "use_qk_norm": True, "first_k_dense_replace": 1,
    },
}  # fmt: skip
"""Sizes of the mixtures of experts."""

NAMES_OF_LLADA2 = {
    "embed_tokens": "word_embeddings", "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm", "self_attn.o_proj": "attention.dense",
    "e_score_correction_bias": "expert_bias",
}  # fmt: skip


def rename_as_llada2(file):
    """Write the tensors of GLM-4.5 under the names of LLaDA2, with one matrix for queries, keys and values."""
    from safetensors.numpy import load_file, save_file

    tensors = {}
    for name, x in load_file(file).items():
        for old, new in NAMES_OF_LLADA2.items():
            name = name.replace(old, new)
        tensors[name] = x
    for layer in range(2):
        parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"model.layers.{layer}.attention.query_key_value.weight"] = np.concatenate(parts)
    save_file(tensors, file)


def publish(tiny, folder, kind, **changes):
    """Write a tiny folder in the layout of the authors of `kind`. Return its model in torch."""
    base, fields, _, piece = PUBLISHED[kind]
    model = tiny.model(base, **SMALL.get(kind, {}))
    if kind == "llada2_moe":
        model.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
    tiny.save(model, folder)
    if kind == "llada2_moe":
        rename_as_llada2(folder / "model.safetensors")
    rewrite(folder / "config.json", {"model_type": kind, **fields, **changes})
    if piece is not None:
        written = json.loads((folder / "tokenizer.json").read_text())
        vocab = written["model"]["vocab"]
        vocab.pop(f"w{MASK}", None)
        vocab[piece] = MASK
        (folder / "tokenizer.json").write_text(json.dumps(written))
    return model


def rewrite(file, changes):
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def allowed(size: int, block: int | None) -> np.ndarray:
    """Return bool[T, T], the columns that each column sees."""
    of_block = np.arange(size) // (block or size)
    return of_block[None] <= of_block[:, None]


def logits(target: Target, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Compute the logits of one pass without a cache."""
    model, size = target.model, tokens.shape[1]
    cache = model.init_cache(target.params, None, 1, 1)
    positions = jnp.arange(size)[None]
    return np.asarray(
        model.forward(target.params, tokens, cache, positions=positions, mask=jnp.asarray(mask)[None])[0].logits[0]
    )


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_layouts_are_read_as_their_authors_run_them(kind, tiny, texts, tmp_path):
    import torch

    model = publish(tiny, tmp_path, kind)
    assert is_diffusion(tmp_path)
    denoiser, _ = specjax.load_denoiser(tmp_path)
    assert isinstance(denoiser, Denoiser) and denoiser.mask_token == MASK
    assert {name: getattr(denoiser, name) for name in FULL} == PUBLISHED[kind][2]
    tokens, mask = texts[:1], allowed(texts.shape[1], denoiser.block)
    unseen = torch.where(torch.tensor(mask), 0.0, -torch.inf)[None, None]
    with torch.no_grad():
        theirs = model.float()(torch.tensor(tokens, dtype=torch.long), attention_mask=unseen).logits[0].numpy()
    np.testing.assert_allclose(logits(denoiser.target, tokens, mask), theirs, atol=1e-4)


@pytest.mark.parametrize("kind", SMALL)
def test_mixtures_equal_their_equations(kind, tiny, texts, tmp_path, monkeypatch):
    """transformers has no class of these mixtures, so their equations are written in float64."""
    publish(tiny, tmp_path, kind)
    denoiser, _ = specjax.load_denoiser(tmp_path)
    tokens, mask = texts[:1], allowed(texts.shape[1], denoiser.block)
    ours = logits(denoiser.target, tokens, mask)
    expected = mixture_oracle.oracle_logits(tmp_path, kind, tokens[0], mask)
    tolerance = 1e-5 * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(ours, expected, atol=tolerance)
    routes = "routes_of_llada2" if kind == "llada2_moe" else "routes_of_qwen"
    true = getattr(mixture_oracle, routes)
    one_less = lambda c, *scores: true(c | {"num_experts_per_tok": 1}, *scores)
    monkeypatch.setattr(mixture_oracle, routes, one_less)
    assert np.abs(mixture_oracle.oracle_logits(tmp_path, kind, tokens[0], mask) - ours).max() > 20 * tolerance


LLADA = {
    "model_type": "llada", "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 48,
    "vocab_size": 96, "embedding_size": 96, "max_sequence_length": 64, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "mask_token_id": MASK, "weight_tying": False, "include_bias": False, "include_qkv_bias": False, "rope": True,
    "activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms", "alibi": False, "eos_token_id": 2,
}  # fmt: skip


def write_llada(folder, tiny, **changes):
    """Return tensors by name, and write them under the names and the config of LLaDA-8B."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tiny.save(tiny.model("llama"), folder)  # for its tokenizer
    generator = torch.Generator().manual_seed(3)
    random = lambda *shape: torch.randn(shape, generator=generator) * 2 * shape[-1] ** -0.5
    norm = lambda: 1 + 0.3 * torch.randn(32, generator=generator)
    at = "model.transformer."
    tensors = {at + "wte.weight": random(96, 32), at + "ln_f.weight": norm(), at + "ff_out.weight": random(96, 32)}
    for i in range(2):
        block = f"{at}blocks.{i}."
        tensors |= {block + f"{name}.weight": norm() for name in ("attn_norm", "ff_norm")}
        tensors |= {block + f"{name}.weight": random(32, 32) for name in ("q_proj", "k_proj", "v_proj", "attn_out")}
        tensors |= {block + f"{name}.weight": random(48, 32) for name in ("ff_proj", "up_proj")}
        tensors[block + "ff_out.weight"] = random(32, 48)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLADA | changes))
    return tensors


def llada(tensors, tokens):
    """Run the forward pass of the release, by the names of its tensors. Every column sees every other."""
    import torch

    silu = torch.nn.functional.silu
    of = lambda name: tensors[f"model.transformer.{name}.weight"]
    norm = lambda x, name: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * of(name)
    angles = torch.outer(torch.arange(len(tokens)).float(), 500000.0 ** (-torch.arange(0, 8, 2).float() / 8))
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    turned = lambda x: x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin
    x = of("wte")[tokens]
    for i in range(2):
        at = f"blocks.{i}."
        y = norm(x, at + "attn_norm")
        q, k, v = ((y @ of(f"{at}{name}_proj").T).view(-1, 4, 8) for name in "qkv")
        weights = torch.softmax(torch.einsum("qhd,khd->hqk", turned(q), turned(k)) * 8**-0.5, -1)
        x = x + torch.einsum("hqk,khd->qhd", weights, v).reshape(-1, 32) @ of(at + "attn_out").T
        y = norm(x, at + "ff_norm")
        x = x + (silu(y @ of(at + "ff_proj").T) * (y @ of(at + "up_proj").T)) @ of(at + "ff_out").T
    return norm(x, "ln_f") @ of("ff_out").T


def test_llada_by_the_names_of_its_tensors(tiny, texts, tmp_path):
    import torch

    tensors = write_llada(tmp_path, tiny)
    denoiser, _ = specjax.load_denoiser(tmp_path)
    assert {name: getattr(denoiser, name) for name in FULL} == FULL and denoiser.mask_token == MASK
    theirs = llada(tensors, torch.tensor(texts[0], dtype=torch.long)).numpy()
    size = texts.shape[1]
    np.testing.assert_allclose(logits(denoiser.target, texts[:1], allowed(size, None)), theirs, atol=1e-4)


def test_a_loaded_denoiser_writes_a_text(tiny, tmp_path):
    publish(tiny, tmp_path, "sdar")
    with pytest.raises(UsageError, match=r"is a diffusion model; load it with specjax\.load_denoiser"):
        specjax.load(tmp_path)
    denoiser, _ = specjax.load_denoiser(tmp_path)
    result = specjax.denoise(denoiser, "sdar", [[5, 6, 7]], key=0, max_new_tokens=6)
    assert result.lengths.tolist() == [6] and MASK not in result.to_lists()[0]


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("Dream", {"mask_token_id": None}, "defines the mask token; add mask_token_id"),
        ("Dream", {"mask_token_id": 96}, "mask_token_id 96, which must be below the vocabulary size, 96"),
        ("Dream", {"mask_token_id": 2}, "mask_token_id 2, which is also an end token"),
        ("Dream", {"block_size": 32}, "a Dream model with block_size, which specjax does not support"),
        ("llada2_moe", {"score_function": "softmax"}, 'has score_function "softmax"; specjax supports sigmoid only'),
        ("lladamoe", {"model_type": "llada", "qk_layernorm": False}, "has qk_layernorm .*; specjax supports True only"),
        ("lladamoe", {"routed_scaling_factor": 2.5}, "has routed_scaling_factor 2.5; specjax supports 1 only"),
        ("sdar", {"model_type": "sdar2"}, r'is "sdar2", a diffusion model, which specjax does not support'),
    ],
)
def test_what_is_not_known_is_refused_in_a_sentence(kind, changes, words, tiny, tmp_path):
    publish(tiny, tmp_path, kind, **changes)
    with pytest.raises(UsageError, match=words):
        specjax.load_denoiser(tmp_path)


def test_llada_with_another_formula_is_refused(tiny, tmp_path):
    write_llada(tmp_path, tiny, alibi=True)
    with pytest.raises(UsageError, match=r"has alibi .*; for LLaDA specjax supports"):
        specjax.load_denoiser(tmp_path)


def test_a_folder_is_planned_as_the_denoiser_that_it_is(tiny, tmp_path):
    """Planning needs only its config and tokenizer."""
    publish(tiny, tmp_path, "sdar")
    (tmp_path / "model.safetensors").unlink()
    work = make_workload(str(tmp_path), "v5e:1x1", context=8, max_new_tokens=8, block=2)
    assert (work.method, work.reading) == ("sdar", (MASK, *(BLOCKS | {"block": 2}).values()))
    rewrite(tmp_path / "config.json", {"block_size": None})
    with pytest.warns(CheckpointWarning, match="lacks the block size; assumed 4, as released"):
        work = make_workload(str(tmp_path), "v5e:1x1", context=8, max_new_tokens=8)
    assert work.reading == (MASK, *BLOCKS.values())


def test_autoregressive_folders_stay_targets(tiny, tmp_path):
    tiny.save(tiny.model("qwen2"), tmp_path)
    assert not is_diffusion(tmp_path) and read_model(tmp_path).denoiser_settings is None
    assert isinstance(specjax.load(tmp_path)[0], Target)
    with pytest.raises(UsageError, match=r"is an autoregressive model; load it with specjax\.load"):
        specjax.load_denoiser(tmp_path)
    assert not is_diffusion("nowhere") and not is_diffusion(None)


def test_every_kind_is_tried():
    assert set(denoisers.KINDS) - {"a2d-qwen2", "a2d-llama", "llada"} == set(PUBLISHED) - {"qwen2", "llama"}


@pytest.mark.parametrize(("kind", "piece"), [("sdar", "<|MASK|>"), ("llama", "<[MASK_TOKEN]>")])
def test_the_block_of_the_release_is_used_with_a_note(kind, piece, tiny, tmp_path):
    """The published configs of SDAR and Stable-DiffCoder state neither block nor mask."""
    publish(tiny, tmp_path, kind, block_size=None)
    with pytest.warns(CheckpointWarning, match="lacks the block size; assumed 4, as released") as caught:
        denoiser, _ = specjax.load_denoiser(tmp_path)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert (denoiser.block, denoiser.mask_token, denoiser.attention) == (4, MASK, "block_causal")


def test_the_caller_names_block_and_mask(tiny, tmp_path):
    publish(tiny, tmp_path, "sdar", block_size=None)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["<|MASK|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        denoiser, _ = specjax.load_denoiser(tmp_path, block=8, mask_token=90)
    assert (denoiser.block, denoiser.mask_token) == (8, 90)
    with pytest.raises(UsageError, match="defines the mask token; add mask_token_id to the config, or pass mask_token"):
        specjax.load_denoiser(tmp_path, block=8)
    for options, words in (
        ({"block": 0}, "block must be a whole number of at least 1, not 0"),
        ({"block": True}, "block must be"),
        ({"mask_token": -1}, "mask_token must be a token id, not -1"),
        ({"mask_token": 96}, "^mask_token 96, which must be below the vocabulary size, 96"),
        ({"mask_token": 2}, "^mask_token 2, which is also an end token"),
    ):
        with pytest.raises(UsageError, match=words):
            specjax.load_denoiser(tmp_path, **({"block": 4, "mask_token": 90} | options))


def test_the_mask_of_the_release_is_used_with_a_note(tiny, tmp_path):
    publish(tiny, tmp_path, "llama")
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["<[MASK_TOKEN]>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.warns(CheckpointWarning, match="defines the mask token; assumed 5, as released"):
        assert specjax.load_denoiser(tmp_path)[0].mask_token == 5


def test_a_block_needs_a_model_with_blocks(tiny, tmp_path):
    publish(tiny, tmp_path / "dream", "Dream")
    with pytest.raises(UsageError, match=r"block applies to block-causal models, and .* has full"):
        specjax.load_denoiser(tmp_path / "dream", block=4)
    publish(tiny, tmp_path / "a2d", "a2d-qwen3")
    assert specjax.load_denoiser(tmp_path / "a2d", block=4)[0].block == 4
    tiny.save(tiny.model("qwen2"), tmp_path / "qwen2")
    for option in ("block", "mask_token"):
        with pytest.raises(UsageError, match=f"^{option} applies to diffusion models"):
            specjax.load(tmp_path / "qwen2", **{option: 4})


def test_a_sparse_config_has_the_vocabulary_of_its_family():
    """The model itself has the size of its family's class then."""
    tokenizer = SimpleNamespace(names={}, vocab=("a",), eos=())
    for kind, rows in (("sdar", 151_936), ("a2d-llama", 32_000)):
        read = lambda mask, kind=kind: denoisers.read_denoiser_settings(
            ConfigFields({"model_type": kind, "mask_token_id": mask, "block_size": 4}, "config.json"), tokenizer
        )
        assert read(rows - 1).mask_token == rows - 1
        with pytest.raises(UsageError, match=f"mask_token_id {rows}, which must be below the vocabulary size, {rows}"):
            read(rows)


def test_a_mask_in_the_map_of_special_tokens_makes_a_denoiser(tiny, tmp_path):
    """Open-dCoder has the type of autoregressive models, and the command line looks at the small files alone."""
    tiny.save(tiny.model("qwen2"), tmp_path)
    for name in ("w7", {"content": "w7"}):
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"mask_token": name}))
        assert is_diffusion(tmp_path) and read_model(tmp_path).denoiser_settings.mask_token == 7


@pytest.mark.parametrize(("shape", "settings", "kind"), [
    ({}, FULL, "a2d-llama"),
    ({}, BLOCKS, "a2d-llama"),
    ({"qk_norm": True}, BLOCKS, "a2d-qwen3"),
    ({"qkv_bias": True}, FULL, "a2d-qwen2"),
    ({"qkv_bias": True}, SHIFTED, "Dream"),
    ({"qkv_bias": True}, BLOCKS | {"alignment": "shifted", "seeding": "seed_and_mask"}, "Fast_dLLM_Qwen"),
])  # fmt: skip
def test_a_denoiser_is_written_and_loaded_with_its_settings(tiny, tmp_path, shape, settings, kind):
    """Weights and settings are equal, under a `model_type` of a release with the same fields."""
    tiny.save(tiny.model("llama"), tmp_path / "tokenizer")
    config = LlamaConfig(
        vocab_size=96, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=16, max_positions=64,
        **shape,
    )  # fmt: skip
    denoiser = init_denoiser(config, mask_token=MASK, **settings)
    save_denoiser_model(tmp_path / "out", denoiser, tmp_path / "tokenizer")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        loaded, _ = specjax.load_denoiser(tmp_path / "out")
    assert {name: getattr(loaded, name) for name in settings} == settings and loaded.mask_token == MASK
    jax.tree.map(np.testing.assert_array_equal, loaded.params, denoiser.params)
    with pytest.raises(UsageError, match="is a diffusion model"):
        specjax.load(tmp_path / "out")


def test_settings_that_no_config_expresses():
    fields = {"model_type": "llama"}
    settings = denoisers.DenoiserSettings(MASK, "full", None, "shifted", "all_masked")
    with pytest.raises(UsageError, match=r"no config\.json of type llama expresses a denoiser with shifted alignment"):
        denoisers.write_denoiser_settings(fields, settings)
