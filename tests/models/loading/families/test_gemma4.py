"""Gemma 4 against the classes of transformers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemma4_models import LAYERS, SIZES, gemma4, torch, transformers
from hybrid_logits import whole_text_logits
from tiers import those

import specjax
from specjax import models
from specjax.configs import gemma4_e2b
from specjax.errors import UsageError
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.formats import hf
from specjax.models.loading.formats.writing import save_model
from specjax.models.loading.tensors.assembly import assemble, check_tensors
from specjax.models.rotary import RopeScaling
from specjax.types import Target

compiled_logits = jax.jit(whole_text_logits, static_argnums=0)
ROUNDING, SEEN = 3e-5, 1e-2
FULL = {"model_type": "gemma4_text", **SIZES, "num_hidden_layers": 4, "layer_types": LAYERS * 2}


@pytest.mark.parametrize(("form", "stacked"), [("small", False), ("large", True)])
def test_logits(check_parity, form, stacked):
    config, *_ = check_parity(lambda: gemma4(form), stacked=stacked, atol=ROUNDING)
    assert config.model_type == "gemma4" and config.period == (2 if form == "large" else config.num_layers)
    assert len(models.make_model(config).init_cache(None, None, 1, 128).attention.k) == (2 if stacked else 4)


def with_changes(config, **changes):
    """Return a config whose global layers have other fields."""
    kinds = tuple(kind._replace(changes=tuple((dict(kind.changes) | changes).items())) if kind.changes else kind
                  for kind in config.kinds)  # fmt: skip
    return {"kinds": kinds}


def with_values(layers):
    """Return the parameters of layers in which values have a copy of the projection of the keys."""
    attention = lambda layer: layer["attention"]
    copied = lambda layer: layer | {"attention": attention(layer) | {"v": attention(layer)["k"]}}
    return {i: layer if "v" in attention(layer) else copied(layer) for i, layer in layers.items()}


def swapped_layers(config, params):
    """Return parameters in which two layers have each other's rows of the table of layer inputs."""
    table = params["layer_inputs"]["table"]["weight"]
    rows = table.reshape(len(table), config.num_layers, -1)[:, ::-1].reshape(table.shape)
    return params | {"layer_inputs": params["layer_inputs"] | {"table": {"weight": rows}}}


RULES = {
    "value norm": lambda c: {"value_norm": False},
    "scale": lambda c: {"query_scale": None},
    "soft cap": lambda c: {"logit_softcap": None},
    "window": lambda c: {"window": 16},
    "local base": lambda c: {"rope_base": 1e6},
    "embedding": lambda c: {"scales_embedding": False},
    "shared keys": lambda c: {
        "kinds": tuple(kind._replace(keys_of=kind.keys_of and kind.keys_of - 2) for kind in c.kinds)
    },
    "no window": lambda c: with_changes(c, window=8),
    "global base": lambda c: with_changes(c, rope_base=1e4),
    "all pairs": lambda c: with_changes(c, rope_scaling=None),
    "first numbers": lambda c: with_changes(c, rope_scaling=None, rotary_dim=8),  # with the frequencies of a small head
    "share": lambda c: with_changes(c, rope_scaling=RopeScaling("proportional", 1.0, share=0.5)),
}


QUICK = "shared keys", "first numbers"


@pytest.mark.parametrize("rules", those({QUICK}, [QUICK, (*RULES,)]))
def test_each_forgotten_rule_is_seen(check_parity, rules):
    config, params, expected, tokens = check_parity(lambda: gemma4("small"), atol=ROUNDING)
    for rule in rules:
        assert difference(config, params, expected, tokens, **RULES[rule](config)) > SEEN, rule
    scales = {i: layer | {"scale": {"weight": jnp.ones(1)}} for i, layer in params["layers"].items()}
    for changed in (params | {"layers": scales}, swapped_layers(config, params)):
        assert difference(config, changed, expected, tokens) > SEEN


def difference(config, params, expected, tokens, **changes):
    model = models.make_model(dataclasses.replace(config, **changes))
    return np.abs(np.asarray(compiled_logits(model, params, tokens)) - expected).max()


def test_values_are_the_keys_before_their_norm(check_parity):
    config, params, expected, tokens = check_parity(lambda: gemma4("large"), atol=ROUNDING)
    assert "v" not in params["layers"][1]["attention"]
    changes = with_changes(config, keys_are_values=False)
    layers = with_values(params["layers"])
    assert difference(config, params | {"layers": layers}, expected, tokens, **changes) < 10 * ROUNDING
    projection = {"weight": layers[1]["attention"]["v"]["weight"][::-1]}
    layers[1] |= {"attention": layers[1]["attention"] | {"v": projection}}
    assert difference(config, params | {"layers": layers}, expected, tokens, **changes) > SEEN


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["small", "large"])
def test_trees_and_rewinding(check_parity, form):
    config, params, *_ = check_parity(lambda: gemma4(form), stacked=form == "large", atol=ROUNDING)
    assert specjax.check_model(models.make_model(config), params)


@pytest.mark.exhaustive
def test_drafts_do_not_change_the_text(check_parity):
    few = {"num_hidden_layers": 3, "layer_types": [*LAYERS, "full_attention"], "num_kv_shared_layers": 1}
    config, params, *_ = check_parity(lambda: gemma4("small", **few), atol=ROUNDING)
    model = models.make_model(config)
    assert model.rewind is not None and not model.capabilities.reads_in_order
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6]]
    target = Target(model, params)
    plain, drafted = (
        specjax.decode(target, drafter, prompts, key=0, max_new_tokens=24) for drafter in (None, "suffix")
    )
    assert jnp.array_equal(plain.tokens, drafted.tokens)


@pytest.mark.parametrize("form", ["small", "large"])
def test_a_saved_model_is_read_by_transformers(form, tmp_path):
    torch.manual_seed(0)
    model = gemma4(form).eval()
    model.save_pretrained(tmp_path / "original")
    loaded = hf.read(tmp_path / "original", dtype="float32", stacked=form == "large")
    params = assemble(loaded)
    save_model(tmp_path / "saved", Target(models.make_model(loaded.config), params))
    again = hf.read(tmp_path / "saved", dtype="float32", stacked=form == "large")
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, params, assemble(again))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        np.testing.assert_allclose(reference(tokens).logits, model(tokens).logits, atol=2e-6)


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path):
    """Other towers are left out, and so are keys of layers that read those of another one."""
    from safetensors.torch import load_file, save_file

    model = gemma4("small")
    model.save_pretrained(tmp_path)
    tensors = {"model.language_model." + name.removeprefix("model."): x for name, x in
               load_file(tmp_path / "model.safetensors").items()}  # fmt: skip
    for name in ("model.vision_tower.x", "model.audio_tower.x", "model.embed_vision.x"):
        tensors[name] = torch.ones(2)
    for name in ("k_proj", "v_proj"):
        tensors[f"model.language_model.layers.5.self_attn.{name}.weight"] = torch.ones(32, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    text = model.config.to_dict()
    multimodal = {"model_type": "gemma4", "text_config": text, "architectures": ["Gemma4ForConditionalGeneration"]}
    checkpoint = hf.read(tmp_path, ConfigFields(multimodal, "config.json"), dtype="float32", stacked=False)
    check_tensors(checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_moe_block": True, "num_experts": 8}, "mixture of experts .enable_moe_block."),
        ({"use_bidirectional_attention": "all"}, "its tokens see later ones"),
        ({"num_kv_shared_layers": 4}, "leaves no layer with keys"),
        ({"num_kv_shared_layers": 3}, "leaves no layer with keys"),
        ({"attention_bias": True}, "attention biases"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, 'rope_type "yarn"'),
        ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}}, "different heads in layers of one kind"),
        ({"per_layer_config": {"4": {"head_dim": 32}}}, 'has "4" in per_layer_config, which must be from 0 to 3'),
        ({"per_layer_config": {"x": {"head_dim": 32}}}, 'has "x" in per_layer_config, which must be from 0 to 3'),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types, but num_hidden_layers is 4"),
    ],
)
def test_other_forms_are_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        hf.parse_config(ConfigFields(FULL | changes, "config.json"), dtype="float32")


def test_fields_that_are_left_out_have_the_values_of_transformers():
    """The class has 30 layers by default, and pads their numbers with zeros."""
    described = json.loads(json.dumps(transformers.Gemma4TextConfig().to_dict()))
    assert {"05", "29"} <= described["per_layer_config"].keys()
    read = lambda fields: hf.parse_config(ConfigFields(fields, "config.json"), dtype="float32")[0]
    assert read(described) == read({"model_type": "gemma4_text"})


def test_the_published_form_and_that_of_newer_files_are_equal():
    sizes = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    published, _ = hf.parse_config(ConfigFields(FULL | sizes, "config.json"), dtype="float32")
    entries = {str(i): {"head_dim": 32, "num_key_value_heads": 1} for i in (1, 3)}
    newer = {**FULL, **sizes, "global_head_dim": None, "per_layer_config": entries}
    assert hf.parse_config(ConfigFields(newer, "config.json"), dtype="float32")[0] == published


def test_the_published_sizes():
    """The config of E2B is what its published fields say, according to a table of its authors' port to TPUs."""
    fields = {
        "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
        "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "layer_types": (4 * ["sliding_attention"] + ["full_attention"]) * 7, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    read, _ = hf.parse_config(ConfigFields(fields, "config.json"), dtype="bfloat16", name="gemma-4-e2b")
    assert read == gemma4_e2b.get_config()


def test_options_that_do_not_fit():
    config, _ = hf.parse_config(ConfigFields(FULL | {"num_kv_shared_layers": 2}, "config.json"), dtype="float32")
    assert dataclasses.replace(config, joined=("qkv", "gate_up")).joined == ("gate_up",)
    with pytest.raises(UsageError, match="layer 3 of gemma4 reads the keys of layer 2, which must be an earlier"):
        kinds = (*config.kinds[:3], config.kinds[3]._replace(keys_of=2))
        dataclasses.replace(config, kinds=kinds, name="gemma4")
    with pytest.raises(UsageError, match="its layers have several kinds"):
        dataclasses.replace(config, same_bits=True, dtype="bfloat16")
    assert config.draft_head_config().window is None and not config.draft_head_config().value_norm
