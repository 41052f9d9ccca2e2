"""Tiny Gemma 4 models and assistants of transformers in the published forms of their config, with random weights."""

import numpy as np
import pytest
from hybrid_gguf import write_tokenizer

from specjax.models import make_model
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.assembly import assemble
from specjax.types import Target

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "max_position_embeddings": 256,
    "final_logit_softcapping": 3.0, "initializer_range": 0.15,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
FORMS = {
    "small": {  # as E2B and E4B
        "num_hidden_layers": 6, "layer_types": LAYERS * 3, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_key_value_heads": 1,
    },
    "large": {  # as 31B
        "num_hidden_layers": 4, "layer_types": LAYERS * 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
}  # fmt: skip


def gemma4(form, **changes):
    """Return a model. The scales of its layers, which are buffers, differ too."""
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SIZES | FORMS[form] | changes))
    for i, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.7 + 0.1 * i)
    return model


def loaded(reference, folder) -> Target:
    """Return a model of transformers as a target here. The folder gets its files."""
    reference.save_pretrained(folder)
    checkpoint = hf.read(folder, dtype="float32", stacked=False)
    return Target(make_model(checkpoint.config), assemble(checkpoint))


FEW = {"num_hidden_layers": 3, "layer_types": [*LAYERS, "full_attention"], "num_kv_shared_layers": 1}
"""A target with one layer of each kind that has keys, and one without."""
CLUSTERS, CHOSEN = 8, 3


def assistant(*, clusters=CLUSTERS, **changes):
    """Return an assistant of the form "small". Its norms, scales of layers and clusters differ too."""
    shapes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "layer_types": LAYERS,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "num_key_value_heads": 1, "final_logit_softcapping": None,
    }  # fmt: skip
    text = transformers.Gemma4TextConfig(**SIZES | shapes | changes)
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=SIZES["hidden_size"], use_ordered_embeddings=clusters > 0,
        num_centroids=clusters, centroid_intermediate_top_k=CHOSEN,
    )  # fmt: skip
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    if clusters:
        model.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    for i, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.8 + 0.1 * i)
    return model


def copying_pair(**changes):
    """Return a target, and an assistant that has its last two layers, which read the keys of its first two.

    The first two layers add nothing to the stream, so both models differ in two things only: queries of the assistant
    do not read the root, and have its position.
    """
    sizes = {"num_hidden_layers": 4, "layer_types": LAYERS * 2, "num_kv_shared_layers": 2, "initializer_range": 0.3}
    target = gemma4("small", **sizes | {"use_double_wide_mlp": False} | changes).eval()
    same = {"hidden_size": SIZES["hidden_size"], "intermediate_size": SIZES["intermediate_size"]}
    copy, layers = assistant(clusters=0, **same | changes), target.model.layers
    for layer in layers:
        layer.layer_scalar.fill_(1.0)
        layer.post_per_layer_input_norm.weight.data.fill_(0.0)
    for i, layer in enumerate(layers):
        layer.post_attention_layernorm.weight.data.fill_(3.0 if i > 1 else 0.0)
        layer.post_feedforward_layernorm.weight.data.fill_(3.0 if i > 1 else 0.0)
    for layer, source in zip(copy.model.layers, layers[2:], strict=True):
        layer.load_state_dict({name: source.state_dict()[name] for name in layer.state_dict()})
    copy.model.norm.load_state_dict(target.model.norm.state_dict())
    copy.model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
    width = SIZES["hidden_size"]
    copy.pre_projection.weight.data.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], 1))
    return target, copy


def write_gguf(model, file, **changes):
    """Write a model as GGUF, with the tensor names of the package gguf and the fields of llama.cpp's converter.

    changes: other values of fields; None leaves one out.
    """
    gguf = pytest.importorskip("gguf")
    c, arch = model.config, "gemma4"
    is_local = [kind == "sliding_attention" for kind in c.layer_types]
    attentions = [model.model.layers[is_local.index(local)].self_attn for local in (True, False)]
    (local_dim, full_dim), kv_heads = (
        [attention.head_dim for attention in attentions],
        [len(attention.k_proj.weight) // attention.head_dim for attention in attentions],
    )
    wide = 2 if c.use_double_wide_mlp else 1
    full_rope, local_rope = (c.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    fields = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": [kv_heads[not local] for local in is_local],
        "attention.key_length": full_dim, "attention.value_length": full_dim,
        "attention.key_length_swa": local_dim, "attention.value_length_swa": local_dim,
        "attention.shared_kv_layers": c.num_kv_shared_layers, "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": is_local, "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "feed_forward_length": [
            c.intermediate_size * (wide if i >= c.num_hidden_layers - c.num_kv_shared_layers else 1)
            for i in range(c.num_hidden_layers)
        ],
        "embedding_length_per_layer_input": c.hidden_size_per_layer_input or 0,
        "rope.freq_base": full_rope["rope_theta"], "rope.freq_base_swa": local_rope["rope_theta"],
        "rope.dimension_count": full_dim, "rope.dimension_count_swa": local_dim,
        "final_logit_softcapping": c.final_logit_softcapping,
    }  # fmt: skip
    writer = gguf.GGUFWriter(str(file), arch)
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, list: gguf.GGUFValueType.ARRAY}
    for name, value in (fields | changes).items():
        if value is not None:
            writer.add_key_value(f"{arch}.{name}", value, kinds[type(value)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, c.num_hidden_layers)
    for name, values in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stored = names.get_name(name, try_suffixes=(".weight",))
        stored = f"{stored}.weight" if name.endswith("layer_scalar") else stored
        writer.add_tensor(stored, values.float().numpy())
    pairs = full_dim // 2
    rotated = int(full_rope["partial_rotary_factor"] * pairs)
    divisors = [1.0] * rotated + [1e30] * (pairs - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    write_tokenizer(writer, c.vocab_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
