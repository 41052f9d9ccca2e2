"""Mistakes that readers of hybrid families make. Each one is made in the loader, and must change the logits.

A mistake is a change of the loader's table of stored tensors, so that all mistakes of a family run the same compiled
program. Mistakes in formulas and in constants have programs of their own.
"""

import dataclasses

import jax
import numpy as np
import pytest
from hybrid_families import FAMILIES, OF_MAMBA, logits_of, parity_error, read_both
from tiers import those

from specjax.models.hybrid.config import NO_MULTIPLIERS, GatedDeltaSizes
from specjax.models.hybrid.mixers import gated_delta
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.hybrid import common, lfm2, qwen3_5
from specjax.models.loading.tensors.assembly import Change

VISIBLE = 20  # a mistake is at least so many times as large as the tolerance of parity

PLUS_ONE, NO_ONE = {"add": 1.0}, {"add": 0.0}
LOGARITHM, GROWS = {"change": None}, {"change": Change(np.exp, np.log)}
NEGATED, ABSENT = {"change": Change(np.negative, np.negative)}, {"change": Change(np.zeros_like, np.zeros_like)}
RATE_TWICE = {"change": common.RATE_OF_LOGARITHM}
REVERSED = {"columns": np.arange(4)[::-1]}
PLAIN = {"order": None, "columns": None}

HEADS, TILED, CHANNELS = qwen3_5.tiled_orders(GatedDeltaSizes(2, 6, 8, 8))
R, A = "recurrent.", "attention."


def turned(size, by):
    """Return the change of a table that reads the rows of a matrix in another order, turned by `by`."""
    return {"order": np.roll(np.arange(size), by)}


def halves(first, second, size, name_of_rows=None):
    """Return the changes for two parameters in the halves of a matrix, in place of rows in turn."""
    return {first: {"order": None, "first": 0}, second: {"order": None, "first": size}}


GATED_QUERIES = {
    "queries and gates in halves": halves(A + "q.weight", A + "output_gate.weight", 32),
    "gates before queries": {
        A + "q.weight": {"order": common.head_rows(2, 16, 32, 16)},
        A + "output_gate.weight": {"order": common.head_rows(2, 16, 32, 0)},
    },
}
GATES_IN_HALVES = {"beta and alpha in halves": halves(R + "beta.weight", R + "alpha.weight", 6)}
HF_DELTA = {
    "w in place of 1 + w": {"mixer_norm.weight": NO_ONE},
    "w in place of 1 + w in the second norm": {"mlp_norm.weight": NO_ONE},
    "w in place of 1 + w in the last norm": {"norm.weight": NO_ONE},
    "w in place of 1 + w in q_norm": {A + "q_norm.weight": NO_ONE},
    "w in place of 1 + w in k_norm": {A + "k_norm.weight": NO_ONE},
    "1 + w in the norm of the output": {R + "norm.weight": PLUS_ONE},
    "a logarithm in place of a rate": {R + "decay.rate": LOGARITHM},
    "a decay that grows": {R + "decay.rate": GROWS},
    "no bias in softplus": {R + "decay.bias": ABSENT},
    "taps in reverse": {R + "convolution.kernel": REVERSED},
    **GATED_QUERIES,
}
GGUF_DELTA = {
    "1 added twice": {"mixer_norm.weight": PLUS_ONE},
    "1 added twice in q_norm": {A + "q_norm.weight": PLUS_ONE},
    "1 added twice in the last norm": {"norm.weight": PLUS_ONE},
    "1 + w in the norm of the output": {R + "norm.weight": PLUS_ONE},
    "a rate of a rate": {R + "decay.rate": RATE_TWICE},
    "a decay that grows": {R + "decay.rate": NEGATED},
    "taps in reverse": {R + "convolution.kernel": REVERSED},
    **GATED_QUERIES,
}
VALUE_HEADS = {
    R + "convolved.weight": CHANNELS, R + "convolution.kernel": CHANNELS, R + "output_gate.weight": TILED,
    R + "beta.weight": HEADS, R + "alpha.weight": HEADS, R + "decay.rate": HEADS, R + "decay.bias": HEADS,
}  # fmt: skip
"""Parameters of Qwen3.5 whose rows a GGUF file has in another order."""

LFM2 = {
    "the order x, b, c": {R + "input.weight": turned(96, 32)},
    "the order c, x, b": {R + "input.weight": turned(96, 64)},
    "taps in reverse": {R + "convolution.kernel": {"columns": np.arange(3)[::-1]}},
}

INNER, SHARED, MAMBA_HEADS = 64, 16, 4  # rows of x, of B or C, and of time steps; Falcon-H1 has half of the first


def mamba(inner):
    """Return the mistakes in the rows of mixers, by the width of the mixer."""
    channels = inner + 2 * SHARED
    swapped = np.concatenate([np.arange(inner), np.roll(np.arange(inner, channels), SHARED)])
    return {
        "the order x, B, C, z": {
            R + "convolved.weight": {"first": 0}, R + "output_gate.weight": {"first": channels},
        },
        "time steps first": {
            R + "time_step.weight": {"first": 0}, R + "output_gate.weight": {"first": MAMBA_HEADS},
            R + "convolved.weight": {"first": MAMBA_HEADS + inner},
        },
        "C before B": {R + "convolved.weight": {"order": swapped}},
        "C before B in the convolution": {R + "convolution.kernel": {"order": swapped}},
        "no bias of the convolution": {R + "convolution.bias": ABSENT},
        "no skip": {R + "skip.weight": ABSENT},
        "no bias in softplus": {R + "decay.bias": ABSENT},
        "taps in reverse": {R + "convolution.kernel": REVERSED},
    }  # fmt: skip


HF_RATES = {
    "a logarithm in place of a rate": {R + "decay.rate": LOGARITHM}, "a decay that grows": {R + "decay.rate": GROWS},
}  # fmt: skip
GGUF_RATES = {"a rate of a rate": {R + "decay.rate": RATE_TWICE}, "a decay that grows": {R + "decay.rate": NEGATED}}
PERMUTED = {"queries that are not permuted": {A + "q.weight": {"heads": 0}}}

MISTAKES = {
    ("qwen3_5", "hf"): HF_DELTA | {
        "tiled value heads": {R + "convolved.weight": {"order": CHANNELS}},
        "tiled beta": {R + "beta.weight": {"order": HEADS}},
        "the gate and the values in turn": {R + "output_gate.weight": {"order": TILED}},
    },
    ("qwen3_5", "gguf"): GGUF_DELTA
    | {f"value heads in order in {path}": {path: PLAIN} for path in (*VALUE_HEADS, R + "out.weight")},
    ("qwen3_next", "hf"): HF_DELTA | GATES_IN_HALVES | {
        "queries, keys, values and gates of all heads in a row": halves(
            R + "convolved.weight", R + "output_gate.weight", 80
        ),
    },
    ("qwen3_next", "gguf"): GGUF_DELTA | GATES_IN_HALVES
    | {f"value heads as in Qwen3.5 in {path}": {path: {"order": order}}
       for path, order in VALUE_HEADS.items() if "beta" not in path and "alpha" not in path},
    ("lfm2", "hf"): LFM2,
    ("lfm2", "gguf"): LFM2,
    **{(family, "hf"): mamba(INNER) | HF_RATES for family in OF_MAMBA},
    **{(family, "gguf"): mamba(INNER) | GGUF_RATES for family in OF_MAMBA},
    ("granite", "hf"): mamba(INNER) | HF_RATES | {
        "the gate after the other half": {"mlp.gate.weight": {"first": 48}, "mlp.up.weight": {"first": 0}},
    },
    ("bamba", "gguf"): mamba(INNER) | GGUF_RATES | PERMUTED,
    ("falcon_h1", "hf"): mamba(INNER // 2) | HF_RATES,
    ("falcon_h1", "gguf"): mamba(INNER // 2) | GGUF_RATES | {
        "queries that are permuted": {A + "q.weight": {"heads": 4}},
    },
}  # fmt: skip
"""Changes of fields of `StoredTensor` by parameter, by mistake, by family and format."""

QUICK = {"qwen3_5", "qwen3_next", "lfm2", "falcon_h1"}


def mistaken(checkpoint, changes):
    """Return a checkpoint whose table of stored tensors has changes."""
    stored = dict(checkpoint.stored)
    for path, fields in changes.items():
        name = path if path == "norm.weight" else f"layers.*.{path}"
        stored[name] = stored[name]._replace(**fields)
    return checkpoint._replace(stored=stored)


@pytest.mark.parametrize("family", those(QUICK, FAMILIES))
def test_mistakes_in_tables(family, tmp_path):
    expected, checkpoints = read_both(family, tmp_path)
    for form, checkpoint in checkpoints.items():
        assert parity_error(logits_of(checkpoint), expected) < 1, form
        errors = {
            name: parity_error(logits_of(mistaken(checkpoint, changes)), expected)
            for name, changes in MISTAKES[family, form].items()
        }
        hidden = {name: error for name, error in errors.items() if error <= VISIBLE}  # NaN is visible
        assert not hidden, form


def of_config(checkpoint, **changes):
    """Return a checkpoint with changed fields of its config."""
    return checkpoint._replace(config=dataclasses.replace(checkpoint.config, **changes))


@pytest.mark.parametrize("family", those({"qwen3_5"}, ["qwen3_5", "bamba"]))
def test_heads_that_are_rotated_as_a_whole_are_visible(family, tmp_path):
    expected, checkpoints = read_both(family, tmp_path)
    for checkpoint in checkpoints.values():
        assert checkpoint.config.rotary_dim == 4
        assert parity_error(logits_of(of_config(checkpoint, rotary_dim=None)), expected) > VISIBLE


def test_factors_of_falcon_h1_are_in_the_weights_of_gguf_files(tmp_path):
    expected, checkpoints = read_both("falcon_h1", tmp_path)
    factors, mixer = checkpoints["hf"].config.multipliers, checkpoints["hf"].config.mamba2
    assert factors != NO_MULTIPLIERS and checkpoints["gguf"].config.multipliers == NO_MULTIPLIERS
    for changes in ({"multipliers": factors}, {"mamba2": mixer}):
        assert parity_error(logits_of(of_config(checkpoints["gguf"], **changes)), expected) > VISIBLE


def small_queries(model):
    """Make queries and keys so small that the constant in their norm is visible."""
    model.model.layers[0].linear_attn.conv1d.weight.data[:32] *= 1e-3


FORMULAS = {
    "no constant": ("UNIT_EPS", 0.0),  # outside of the root it would have no effect on these numbers
    "the constant of a mean": ("UNIT_EPS", 8 * gated_delta.UNIT_EPS),
    "the norm after the gate": ("gated_norm", lambda norm, y, gate: norm(y * jax.nn.silu(gate))),
    "a gate without silu": ("gated_norm", lambda norm, y, gate: norm(y) * jax.nn.sigmoid(gate)),
}
"""Names in `gated_delta` with wrong values."""


def test_mistakes_in_formulas(tmp_path, monkeypatch):
    for name, changes in {"UNIT_EPS": (small_queries,), "gated_norm": ()}.items():
        expected, checkpoints = read_both("qwen3_5", tmp_path / name, *changes)
        assert parity_error(logits_of(checkpoints["hf"]), expected) < 1
        for mistake, (attribute, value) in FORMULAS.items():
            if attribute == name:
                with monkeypatch.context() as context:
                    context.setattr(gated_delta, name, value)
                    mistaken_config = of_config(checkpoints["hf"], name=mistake)  # another program
                    assert parity_error(logits_of(mistaken_config), expected) > VISIBLE, mistake


def test_order_of_value_heads_worked_out_by_hand():
    sizes = GatedDeltaSizes(num_key_heads=2, num_value_heads=6, key_dim=1, value_dim=2)
    heads, values, channels = qwen3_5.tiled_orders(sizes)
    # The file has head 0 of each key head, then head 1 of each, then head 2: 0 3 1 4 2 5 in the order of transformers.
    assert heads.tolist() == [0, 2, 4, 1, 3, 5]
    assert values.tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert channels.tolist() == [0, 1, 2, 3, *(4 + values)] and len(channels) == sizes.channels


PUBLISHED_WIDTHS = {6656: 4608, 10_240: 6912, 12_288: 8192}
"""Widths of the MLPs of LFM2 350M, 700M and 1.2B: in their configs, and in their tensors."""


def test_width_of_the_mlp_of_lfm2():
    for stated, width in PUBLISHED_WIDTHS.items():
        fields = {"model_type": "lfm2", "block_ff_dim": stated, "intermediate_size": 1, "num_hidden_layers": 1}
        assert lfm2.config_from_hf(ConfigFields(fields, "config.json"), dtype="float32").mlp_width == width
    multiplied = fields | {"block_ff_dim": 100, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8}
    # 2 / 3 of 100 is 66, 1.3 of that is 85, and the next multiple of 8 is 88. Rounded only once, it would be 86.
    assert lfm2.config_from_hf(ConfigFields(multiplied, "config.json"), dtype="float32").mlp_width == 88
