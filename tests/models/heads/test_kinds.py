"""Changes of a kind's shapes, as texts."""

import pytest
import toy

from specjax.errors import UsageError
from specjax.models.heads.kinds import KINDS, format_changes


@pytest.mark.parametrize(
    ("kind", "words", "wanted"),
    [
        ("dflash", "num_layers=1", ("num_layers", 1)),
        ("dflash", "taps=0+1+3", ("taps", (0, 1, 3))),
        ("eagle3", "taps=2", ("taps", (2,))),
        ("medusa", "taps=2", None),
        ("eagle3", "taps=2,3", None),
        ("eagle3", "taps=", None),
        ("eagle3", "mlp_width=0", None),
        ("eagle3", "mlp_width=-1", None),
        ("eagle3", "mlp_width", None),
        ("eagle3", "num_layers=0", None),
        ("eagle3", "norm_taps=each", ("norm_taps", "each")),
        ("eagle3", "norm_taps=all", None),
        ("domino", "pure_prefix=0", ("pure_prefix", 0)),
        ("p_eagle", "embeds=no", ("embeds", False)),
        ("p_eagle", "embeds=yes", ("embeds", True)),
        ("p_eagle", "embeds=0", None),
    ],
)
def test_changes(kind, words, wanted):
    assert KINDS[kind].parse_change(words) == wanted
    assert wanted is None or format_changes(dict([wanted])) == [words]


@pytest.mark.parametrize("kind", sorted(kind for kind, row in KINDS.items() if row.taps))
def test_streams_and_width_of_a_head(kind):
    target = toy.tiny_llama(layers=3).model.config
    config = KINDS[kind].of_target(target, taps=(0, 3), mlp_width=8)
    assert config.taps == (0, 3) and config.layer.mlp_width == 8
    head = KINDS[kind].head(config)
    assert head.taps == (0, 3)
    assert KINDS[kind].of_target(target).layer.mlp_width == target.mlp_width
    for wrong in ((4,), (-1, 2), (), (3, 0), (1, 1)):
        with pytest.raises(UsageError, match=r"taps must be rising streams of the target from 0 .* to 3"):
            KINDS[kind].of_target(target, taps=wrong)
