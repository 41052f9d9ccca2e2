"""Tiny models with Mamba-2 layers of transformers, one or more per form of config."""

import pytest

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "initializer_range": 0.2, "tie_word_embeddings": False}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
MIXER = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8}


def mamba2(**changes):
    sizes = {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**SIZES, **sizes, **changes}))


def bamba(**changes):
    sizes = {"num_hidden_layers": 3, "intermediate_size": 48, "attn_layer_indices": [1]}
    return transformers.BambaForCausalLM(
        transformers.BambaConfig(**{**SIZES, **ATTENTION, **MIXER, **sizes, **changes})
    )


def nemotron_h(own_limit=False, **changes):
    """Make a Nemotron-H. Its class ignores `time_step_limit`, which is (0, infinity) in all published files.

    own_limit: leave the limit that the class uses instead, the smallest step of its initialisation.
    """
    sizes = {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "head_dim": 8,
        "intermediate_size": 48, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
    }  # fmt: skip
    config = transformers.NemotronHConfig(**{**SIZES, **ATTENTION, **sizes, **changes})
    model = transformers.NemotronHForCausalLM(config)
    return model if own_limit else without_own_limit(model)


def without_own_limit(model):
    """Return a Nemotron-H with the time steps of its config, which its class ignores."""
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = tuple(model.config.time_step_limit)
    return model


def granite(**changes):
    sizes = {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0, "shared_intermediate_size": 48, "position_embedding_type": "nope",
        "attention_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 7.0,
    }  # fmt: skip
    config = transformers.GraniteMoeHybridConfig(**{**SIZES, **ATTENTION, **MIXER, **sizes, **changes})
    return transformers.GraniteMoeHybridForCausalLM(config)


def falcon_h1(**changes):
    sizes = {
        "num_hidden_layers": 2, "intermediate_size": 48, "mamba_d_ssm": 32, "mamba_rms_norm": True, "head_dim": 8,
        "mamba_norm_before_gate": False, "lm_head_multiplier": 0.3, "embedding_multiplier": 2.5,
        "mlp_multipliers": [0.7, 1.4], "key_multiplier": 0.6, "attention_out_multiplier": 1.3,
        "attention_in_multiplier": 0.8, "ssm_multipliers": [0.5, 1.5, 0.9, 1.2, 0.7], "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.75,
    }  # fmt: skip
    config = transformers.FalconH1Config(**{**SIZES, **ATTENTION, **MIXER, **sizes, **changes})
    return transformers.FalconH1ForCausalLM(config)


FORMS = {
    "mamba2": (mamba2, {}),
    "mamba2 with biases, tied": (mamba2, {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}),
    "mamba2 with a limit of time steps": (mamba2, {"time_step_limit": (0.3, 0.8)}),
    "bamba": (bamba, {}),
    "bamba with biases": (bamba, {"mamba_proj_bias": True}),
    "nemotron_h": (nemotron_h, {}),
    "nemotron_h with biases": (nemotron_h, {"use_bias": True, "mamba_head_dim": 12}),
    "granite without rotation": (granite, {}),
    "granite with rotation": (granite, {"position_embedding_type": "rope", "tie_word_embeddings": True}),
    "falcon_h1": (falcon_h1, {}),
    "falcon_h1 without norms": (falcon_h1, {"mamba_rms_norm": False, "mamba_d_ssm": None}),
    "falcon_h1 with norms before gates": (
        falcon_h1, {"mamba_norm_before_gate": True, "projectors_bias": True, "mamba_proj_bias": True},
    ),
}  # fmt: skip


def make(name):
    """Return a function that makes the model of a form."""
    factory, changes = FORMS[name]
    return lambda **more: factory(**{**changes, **more})
