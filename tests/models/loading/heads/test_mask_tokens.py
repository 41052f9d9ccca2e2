"""The mask token of P-EAGLE and block drafters, by its fields and by tokenizers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import dialects as d
import pytest
from head_oracles import target

from specjax import UsageError
from specjax.models.loading.heads import read_head

ARRAYS = d.eagle3() | d.arrays_of({"mask_hidden": (1, 1, 3 * d.D)})


def written(folder, **changes):
    """Write a P-EAGLE head without a mask token, and with these changes of its config."""
    return d.write(folder, d.layers(8) | {"draft_vocab_size": d.VD, "num_depths": 3} | changes, ARRAYS)


def mask_of(folder, **options) -> int:
    return read_head(folder, target(), **options).flags["mask_token"]


def test_fields_of_all_writers(tmp_path):
    assert mask_of(written(tmp_path, mask_token_id=5)) == 5
    assert mask_of(written(tmp_path, pard_token=6)) == 6
    assert mask_of(written(tmp_path, ptd_token_id=7)) == 7
    assert mask_of(written(tmp_path, mask_token_id=5, pard_token=6)) == 5
    assert mask_of(written(tmp_path, dflash_config={"mask_token_id": 8}, pard_token=6)) == 8
    differing = written(tmp_path, dflash_config={"mask_token_id": 8}, mask_token_id=8, pard_token=6)
    note = read_head(differing, target()).notes[-1]
    assert "has pard_token 6, and dflash_config.mask_token_id 8, which is used" in note
    same = written(tmp_path, dflash_config={"mask_token_id": 6}, pard_token=6)
    assert not any("which is used" in note for note in read_head(same, target()).notes)
    with pytest.raises(UsageError, match="mask_token_id 63, and the target has 64 ids"):
        mask_of(written(tmp_path, pard_token=64))


def test_tokenizers_without_a_field(tmp_path):
    folder = written(tmp_path)
    with pytest.raises(UsageError, match=r"lacks the field mask_token_id, .* set mask_token \(--head-set mask_token="):
        mask_of(folder)
    assert mask_of(folder, settings={"mask_token": "9"}) == 9
    with pytest.raises(UsageError, match="mask_token must be below the vocabulary size, 64, not 99"):
        mask_of(folder, settings={"mask_token_id": 99})
    of_target = SimpleNamespace(vocab=("a", "b", "<mask>", "<pad>"), names={"mask_token": "<pad>"})
    loaded = read_head(folder, target(), tokenizer=of_target)
    assert loaded.flags["mask_token"] == 3 and "assumed 3, of the target's tokenizer" in loaded.notes[-1]
    assert mask_of(folder, tokenizer=SimpleNamespace(vocab=("a", "b", "<mask>"), names={})) == 2
    added = [{"id": 11, "content": "<|MASK|>"}, {"id": 12, "content": "<m>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert mask_of(folder, tokenizer=of_target) == 11, "its own files count first"
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "<m>"}}))
    assert mask_of(folder) == 12
    assert mask_of(written(tmp_path, mask_token="<|MASK|>")) == 11, "the config names one"


def test_depths_are_assumed_with_a_note(tmp_path):
    folder = written(tmp_path, mask_token_id=5, num_depths=None)
    loaded = read_head(folder, target())
    assert loaded.flags["depths"] == 8 and "has no num_depths; assumed 8" in loaded.notes[-1]
    assert not any("num_depths" in note for note in read_head(folder, target(), settings={"depths": 4}).notes)
