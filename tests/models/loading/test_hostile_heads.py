"""Files of heads made to break their readers: each is read, or refused in one short sentence. Nothing else."""

from __future__ import annotations

import json

import pytest
from head_oracles import target
from heads import numbered_head
from hostile import as_json, attacks, changed_json, survives

from specjax import save_head
from specjax.models.heads.kinds import KINDS
from specjax.models.loading.heads import read_head, recognise


@pytest.mark.parametrize(("rng", "count"), attacks(10, 6_000))
@pytest.mark.parametrize("kind", KINDS)
def test_heads(kind, rng, count, tmp_path):
    """Config and header of the tensors, of every kind in the layout that it is written in."""
    save_head(tmp_path, numbered_head(kind, target()), target=target())
    described, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config, whole = json.loads(described.read_text()), weights.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def use():
        recognise(tmp_path)
        read_head(tmp_path, target())

    for case in range(count):
        of_config = rng.random() < 0.6
        described.write_bytes(as_json(rng, changed_json(rng, config)) if of_config else json.dumps(config).encode())
        names = json.dumps(header).encode() if of_config else as_json(rng, changed_json(rng, header))
        weights.write_bytes(len(names).to_bytes(8, "little") + names + data)
        survives(use, case)
