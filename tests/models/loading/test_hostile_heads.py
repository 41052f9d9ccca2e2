"""Files of heads that are damaged: each is read, or refused in one short sentence."""

from __future__ import annotations

import json

import dialects as d
import pytest
from head_oracles import target
from heads import OF_OTHER_TARGETS, numbered_head
from hostile import as_json, attacks, changed_json, survives

from specjax import save_head
from specjax.models.heads.kinds import KINDS
from specjax.models.loading.heads import read_head, recognise


@pytest.mark.parametrize(("rng", "count"), attacks(10, 6_000))
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - OF_OTHER_TARGETS))
def test_heads(kind, rng, count, tmp_path):
    """The config and the tensor header of every kind are damaged, in the layout that specjax writes."""
    save_head(tmp_path, numbered_head(kind, target()), target=target())
    attacked(tmp_path, "model.safetensors", rng, count)


@pytest.mark.parametrize(("rng", "count"), attacks(10, 6_000))
def test_assistants(rng, count, tmp_path):
    """Folders of transformers of the heads that draft for other targets."""
    models = pytest.importorskip("gemma4_models")
    reader = models.loaded(models.gemma4("small", **models.FEW), tmp_path / "target")
    models.assistant().save_pretrained(tmp_path / "assistant")
    attacked(tmp_path / "assistant", "model.safetensors", rng, count, reader)


WRITERS = {
    **{f"eagle3 of {writer}": files for writer, files in d.eagle3_dialects(d.eagle3()).items()},
    "eagle of its authors": (d.layers(8) | {"architectures": ["LlamaForCausalLM"]}, d.eagle()),
    "eagle of speculators": (
        d.of_speculators("eagle", fusion_bias=True, layernorms=False),
        d.renamed(d.eagle(), ("layers.0.", "transformer."), ("fc.", "fusion_fc.")),
    ),
    "falcon": (d.layers(8) | {"architectures": ["LlamaForCausalLM"], "k_mask": 2, "bias": True}, d.falcon()),
    "medusa of vLLM": ({"model_type": "medusa", "num_heads": 3}, d.medusa()),
    "hydra": ({"hydra_num_heads": 2, "hydra_num_layers": 2, "hydra_head_arch": "mlp"}, d.hydra()),
    "kangaroo": (d.layers(8), d.kangaroo()),
    "clover": (d.layers(8, num_hidden_layers=2), d.clover()),
    "mlp_speculator": (
        {
            "model_type": "mlp_speculator", "n_predict": 2, "vocab_size": d.V, "emb_dim": d.D, "inner_dim": 16,
            "tie_weights": False, "scale_input": False,
        },
        d.mlp_speculator(),
    ),
    "redrafter": (
        {"model_type": "recurrent_drafting_drafter", "hidden_size": d.D, "exit_dim": 40, "num_draft_layers": 2},
        d.redrafter(),
    ),
}  # fmt: skip
"""(config, tensors) in the layouts of others."""


@pytest.mark.parametrize(("rng", "count"), attacks(6, 6_000))
@pytest.mark.parametrize("writer", WRITERS)
def test_heads_of_others(writer, rng, count, tmp_path):
    name = {"hydra": "hydra_lm_head.safetensors"}.get(writer, "model.safetensors")
    attacked(d.write(tmp_path / "head", *WRITERS[writer], name), name, rng, count)


def attacked(folder, name, rng, count, of_target=None):
    """Read the folder of a head with a damaged config or tensor header."""
    described, weights = folder / "config.json", folder / name
    config, full = json.loads(described.read_text()), weights.read_bytes()
    length = int.from_bytes(full[:8], "little")
    header, data = json.loads(full[8 : 8 + length]), full[8 + length :]

    def use():
        recognise(folder)
        read_head(folder, of_target or target())

    assert survives(use) is None, "as it was written"
    for case in range(count):
        of_config = rng.random() < 0.6
        described.write_bytes(as_json(rng, changed_json(rng, config)) if of_config else json.dumps(config).encode())
        names = json.dumps(header).encode() if of_config else as_json(rng, changed_json(rng, header))
        weights.write_bytes(len(names).to_bytes(8, "little") + names + data)
        survives(use, case)
