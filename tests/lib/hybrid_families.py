"""Small models of all hybrid families with random weights, as torch models, folders and GGUF files."""

import hybrid_gguf
import jax
import mamba_gguf
import mamba_models
import numpy as np
from hybrid_logits import whole_text_logits
from hybrid_models import lfm2, qwen3_5, qwen3_next, torch, varied

from specjax import models
from specjax.models.loading.formats import gguf, hf
from specjax.models.loading.tensors.assembly import assemble


def without(fields, *names):
    """Return the fields that have other names."""
    return {name: value for name, value in fields.items() if name not in names}


LARGE = {"initializer_range": 0.1}  # of weights, so that small mistakes are visible
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], **LARGE}
NEMOTRON = {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}

FAMILIES = {
    "qwen3_5": lambda: varied(qwen3_5, **TWO),
    "qwen3_next": lambda: varied(qwen3_next, **TWO),
    "lfm2": lambda: varied(lfm2, num_hidden_layers=2, layer_types=["conv", "full_attention"], **LARGE),
    "mamba2": lambda: varied(mamba_models.mamba2),
    "bamba": lambda: varied(mamba_models.bamba, num_hidden_layers=2),
    "nemotron_h": lambda: varied(mamba_models.nemotron_h, **NEMOTRON),
    "granite": lambda: varied(mamba_models.granite, **TWO),
    "falcon_h1": lambda: varied(mamba_models.falcon_h1),
}
"""Makers of torch models by family, with one layer of each kind."""

PAIRS = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 96, "initializer_range": 0.03}
HEADS = {"num_attention_heads": 4}
LARGER = {
    "qwen3_5": lambda: varied(qwen3_5, **PAIRS | WIDE | HEADS),
    "qwen3_next": lambda: varied(qwen3_next, **PAIRS | WIDE | HEADS),
    "lfm2": lambda: varied(lfm2, **WIDE | HEADS, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2),
    "mamba2": lambda: varied(mamba_models.mamba2, **without(WIDE, "intermediate_size"), head_dim=64),
    "bamba": lambda: varied(mamba_models.bamba, **WIDE, num_hidden_layers=4, attn_layer_indices=[1, 3]),
    "nemotron_h": lambda: varied(mamba_models.nemotron_h, **WIDE, layers_block_type=NEMOTRON["layers_block_type"] * 2),
    "granite": lambda: varied(mamba_models.granite, **PAIRS | WIDE, shared_intermediate_size=256),
    "falcon_h1": lambda: varied(mamba_models.falcon_h1, **WIDE, mamba_d_ssm=128),
}
"""Makers of torch models by family, whose layers repeat, and whose matrices have rows for all formats."""

OF_MAMBA = "mamba2", "bamba", "nemotron_h", "granite", "falcon_h1"
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 16))


def write_gguf(family, model, file, kind="F32"):
    """Write a model of a family as GGUF."""
    module = mamba_gguf if family in OF_MAMBA else hybrid_gguf
    return module.write(model, file, kind)


def read_both(family, folder, change=lambda model: None):
    """Write a model in both formats. Return its logits in transformers, and a checkpoint by the name of its format.

    change: a function that changes the weights of the model first.
    """
    model = FAMILIES[family]()
    change(model)
    model.save_pretrained(folder / "hf")
    file = write_gguf(family, model, folder / "model.gguf")
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    options = {"dtype": "float32", "name": family}
    return expected, {"hf": hf.read(folder / "hf", **options), "gguf": gguf.read(file, **options)[0]}


def logits_of(checkpoint):
    """Return the logits of the model in a checkpoint. Equal configs share one compiled program."""
    return np.asarray(_logits(models.make_model(checkpoint.config), assemble(checkpoint), TOKENS))


def logits_of_target(target):
    """Return the logits of a loaded model, float32."""
    return np.asarray(_logits(target.model, target.params, TOKENS).astype(np.float32))


_logits = jax.jit(whole_text_logits, static_argnums=0)


def parity_error(logits, expected):
    """Return the largest difference, divided by the tolerance of tests of parity."""
    return np.abs(logits - expected).max() / (1e-5 * max(1.0, np.abs(expected).max()))
