"""The widths of the target pass that `auto` compiles for a batch."""

import numpy as np
import pytest
from toy import markov

from specjax.costs import NO_SHARES, Curve, Shares, estimated, shares_of
from specjax.drafters import auto, choice, prompt_lookup, suffix
from specjax.drafters.widths import LOGITS_BYTES, WIDTHS, select_passes
from specjax.types import Capabilities, Target

LARGE = 262_144


def widths_of(batch, vocab=LARGE, costs=None, widths=WIDTHS, platform="tpu"):
    return select_passes(widths, costs, batch, vocab, "bfloat16", platform, None).widths


def test_one_row_has_the_default_widths():
    assert widths_of(1) == WIDTHS
    assert widths_of(1, 49_152, widths=(1, 4, 8, 16), platform="cpu") == (1, 4, 8, 16)


@pytest.mark.parametrize("batch", [2, 8, 32, 64, 128, 512, 4096])
def test_logits_stay_within_their_bytes_and_every_width_can_pay(batch):
    passes = select_passes(WIDTHS, None, batch, LARGE, "bfloat16", "tpu", None)
    assert max(passes.widths) == 1 or 4 * batch * max(passes.widths) * LARGE <= LOGITS_BYTES
    best = (1 - 0.95 ** np.array(passes.widths)) / 0.05 / passes.costs
    assert (np.diff(best) > 0).all() and passes.costs[0] == 1


def test_large_batches_have_narrow_passes_and_then_none():
    widest = [max(widths_of(batch)) for batch in (1, 16, 64, 128, 4096)]
    assert widest == sorted(widest, reverse=True) and widest[0] == 64 and widest[-1] == 1
    assert 1 < widest[2] <= 16


def test_costs_of_the_device_decide():
    flat, steep = Curve((1, 64), (1.0, 1.1)), Curve((1, 64), (1.0, 64.0))
    assert widths_of(8, 1000, flat) == WIDTHS
    assert widths_of(8, 1000, steep) == (1,)


def test_a_mesh_splits_rows_and_vocabulary():
    class Mesh:
        size, shape = 8, {"data": 2, "model": 4}

    class Model:
        mesh, vocab_size, capabilities, rewind = Mesh, 0, Capabilities(), True

    class Target:
        model, params, pass_params = Model, {"weight": np.zeros(4)}, {"weight": np.zeros(4)}

    alone, spread = (select_passes(WIDTHS, None, 64, LARGE, "bfloat16", "tpu", t) for t in (None, Target))
    assert max(spread.widths) > max(alone.widths)


def test_given_widths_are_obeyed():
    drafter = auto(LARGE, widths=(1, 64), platform="tpu")
    assert drafter.pass_widths(512, None) == [1, 64]


def test_a_large_vocabulary_beside_few_weights_costs_more():
    """Gemma 3 270M by the compiler's schedule: a pass over 16 rows of 4 tokens costs 1.43 plain passes."""
    share = 4 * LARGE / (2 * 268e6)
    small, large = (estimated((1, 4, 16), 16, "bfloat16", "tpu", shares) for shares in (NO_SHARES, Shares(share)))
    assert small[1] < 1.15 < large[1] == pytest.approx(1.43, abs=0.1)
    assert large[2] > 2.32


def test_a_curve_also_has_costs_of_the_narrow_widths():
    curve = Curve((1, 4, 8, 16, 32, 64), (1.0, 1.05, 1.1, 15.0, 20.0, 40.0))
    assert widths_of(64, 1000, curve) == (1, 4, 8)
    assert widths_of(64, 1000, (1.0, 15.0, 20.0, 40.0)) == (1,)


def test_targets_without_parameters():
    assert shares_of(Target(markov().model, ())) == NO_SHARES


def test_drafters_that_contain_auto_have_its_widths_and_room_for_their_own_chains():
    inner = auto(LARGE, platform="tpu")
    for batch in (1, 64):
        widths = inner.pass_widths(batch, None)
        assert suffix(99, fallback=inner).pass_widths(batch, None) == sorted({1, 4, 8, 100, *widths})
        assert choice(inner, prompt_lookup(5), platform="tpu").pass_widths(batch, None) == sorted({1, 6, *widths})
