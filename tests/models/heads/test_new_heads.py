"""Shapes of new heads: the variants of each kind that can be made, and the streams that they read by default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from heads import OF_OTHER_TARGETS

from specjax.errors import UsageError
from specjax.models.heads.kinds import KINDS, init_head
from specjax.models.loading.heads import read_head
from specjax.models.loading.heads.writing import save_head

VARIANTS = {
    "eagle": ("num_layers=2", "norms=yes", "bias=no embeds=yes", "sampler=yes split=yes"),
    "eagle3": (
        "norm_taps=each norm_output=yes num_layers=2", "norm_taps=joined norm_before_residual=yes embeds=yes",
        "own_head=no",
    ),
    "mtp": ("num_layers=3 hidden=raw", "chained=raw final_norm=no zero_first=yes mlp_width=24"),
    "p_eagle": ("norm_taps=each norm_output=yes depths=3",),
    "dflash": ("draft_vocab_size=20 embeds=yes", "from_anchor=yes"),
    "dflash2": ("selector_rank=0 conv_group=8", "conv_taps=0 selector_rank=4 candidates=7"),
    "domino": ("prefix_rank=4 prefix_state=8 pure_prefix=0",),
    "dspark": (
        "markov=gated markov_rank=4", "markov=rnn confidence=state", "markov=no", "confidence=no draft_vocab_size=20",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), [(kind, text) for kind, texts in VARIANTS.items() for text in texts])
def test_a_variant_is_made_written_and_read_back(tmp_path, kind, changes):
    target = toy.tiny_llama(layers=3)
    parsed = dict(KINDS[kind].parse_change(change) for change in changes.split())
    config = KINDS[kind].of_target(target.model.config, **parsed)
    for name, value in parsed.items():
        assert getattr(config, name, getattr(config.layer, name, None)) == value or name == "draft_vocab_size"
    head = init_head(kind, config, jax.random.key(1))
    if "vocabulary" in head.params:
        ids = np.arange(64) % 20 + np.where(np.arange(64) < 20, 0, 20)
        head = head.replace(params=head.params | {"vocabulary": {"place": jnp.asarray(np.minimum(ids, 20), jnp.int32)}})
    save_head(tmp_path, head, target=target)
    loaded = read_head(tmp_path, target)
    assert loaded.kind == kind == loaded.head.head.kind
    jax.tree.map(np.testing.assert_array_equal, loaded.head.params, head.params)
    assert loaded.head.head.max_depth == head.head.max_depth
    for name in (
        "norm_taps",
        "norm_output",
        "norm_before_residual",
        "markov",
        "confidence",
        "pure_prefix",
        "from_anchor",
        "hidden",
        "chained",
        "zero_first",
    ):
        assert getattr(loaded.head.head.config, name, None) == getattr(config, name, None), name


def test_parts_of_another_method_are_refused():
    config = toy.tiny_llama(layers=3).model.config
    with pytest.raises(UsageError, match="is a dflash, not a dspark; use that method"):
        KINDS["dspark"].of_target(config, markov="no", confidence="no")
    with pytest.raises(UsageError, match="leave own_head=False out"):
        KINDS["eagle3"].of_target(config, own_head=False, head_rank=4)


@pytest.mark.parametrize("layers", range(1, 9))
def test_default_streams_rise_in_targets_of_every_depth(layers):
    config = toy.tiny_llama(layers=layers).model.config
    for kind in KINDS.keys() - OF_OTHER_TARGETS:
        taps = getattr(KINDS[kind].of_target(config), "taps", ())
        assert list(taps) == sorted(set(taps)) and all(0 <= tap <= layers for tap in taps), (kind, taps)
    assert len(KINDS["eagle3"].of_target(config).taps) == min(3, layers + 1)
    if layers == 8:
        assert KINDS["eagle3"].of_target(config).taps == (2, 4, 5), "the authors' streams"
