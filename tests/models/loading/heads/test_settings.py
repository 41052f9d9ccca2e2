"""Settings that override the files of a head."""

from __future__ import annotations

import dialects as d
import pytest
from head_oracles import target
from heads import tiny_head

from specjax import UsageError
from specjax.models.loading.heads import load_head, read_head, save_head
from specjax.models.loading.heads.settings import change_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dspark")
    save_head(folder, tiny_head("dspark", target()), target=target())
    return folder


SETTINGS = {
    "from_anchor": ("yes", True), "causal": ("all", "all"), "windows": ("none+5", (None, 5)), "softcap": ("30", 30.0),
    "logit_scale": (2, 2.0), "block_size": ("3", 3), "mask_token": ("7", 7), "taps": ("0+2", (0, 2)),
}  # fmt: skip


def test_values_and_their_texts(folder):
    """Temperatures of the confidence follow the number of slots."""
    for name, (text, value) in SETTINGS.items():
        loaded = read_head(folder, target(), settings={name: text})
        assert loaded.flags[name] == value == getattr(loaded.head.head.config, name), name
        assert load_head(folder, target(), settings={name: value}).head is loaded.head.head
    assert read_head(folder, target(), settings={"windows": "none"}).flags["windows"] == ()
    by_file = read_head(folder, target(), settings={"sample_from_anchor": "true"})
    assert (
        by_file.flags["from_anchor"]
        and len(by_file.head.params["confidence"]["temperatures"]) == by_file.head.head.max_depth
    )
    layer = read_head(folder, target(), settings={"layer.rope_base": "500"}).head.head.config.layer
    assert layer.rope_base == 500.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"anchor": "yes"}, 'a dspark head has no setting "anchor"; it has taps, block_size, mask_token'),
        ({"sample_from_anchor": "yes", "from_anchor": "no"}, '"sample_from_anchor" and "from_anchor" are one setting'),
        ({"from_anchor": [1]}, r"from_anchor of the head must be yes or no, not \[1\]"),
        ({"causal": [1]}, r"causal of the head must be no or windowed or all, not \[1\]"),
        ({"taps": [[0], 2]}, "taps of the head must be a whole number, at least 0"),
        ({"from_anchor": "maybe"}, 'from_anchor of the head must be yes or no, not "maybe"'),
        ({"causal": "some"}, 'causal of the head must be no or windowed or all, not "some"'),
        ({"block_size": "1.5"}, 'block_size of the head must be a whole number, at least 0, not "1.5"'),
        ({"softcap": "nan"}, 'softcap of the head must be a number above 0, not "nan"'),
        ({"taps": "1+99"}, r'the setting taps must be from 0 to 6, not "1\+99"'),
        ({"taps": "1"}, "taps=1 does not fit the tensors of the dspark head; leave it out"),
        ({"embeds": "yes"}, "embeds=yes does not fit the tensors"),
        ({"layer.window": "0"}, 'the setting layer.window must be from 1 to 2147483647, not "0"'),
        ({"block_size": "9" * 5000}, "block_size"),
        ({"layer.rope_base": -1}, "rope_base of the head must be a number above 0, not -1"),
        ({"windows": "3"}, "windows has 1 entries for 2 layers"),
        ({"block_size": 0}, "a block of 0 slots drafts nothing"),
        ({"mask_token": "64"}, "mask_token must be below the vocabulary size, 64, not 64"),
    ],
)
def test_settings_that_a_head_lacks(folder, settings, message):
    with pytest.raises(UsageError, match=message):
        load_head(folder, target(), settings=settings)


def test_flags_of_eagle3(tmp_path):
    config, tensors = d.eagle3_dialects(d.eagle3())["specforge"]
    folder = d.write(tmp_path, config, tensors)
    loaded = read_head(folder, target())
    assert loaded.assumed == ("norm_output",) and "norm before the output layer" in loaded.notes[0]
    fixed = read_head(folder, target(), settings={"norm_output": "yes"})
    assert fixed.flags["norm_output"] and fixed.assumed == ()
    variant = change_config(loaded.head, {"norm_output": True}, "")
    assert variant.head.head is fixed.head.head and variant.setting == "norm_output=yes"


@pytest.mark.parametrize(("kind", "name", "value"), [("msd", "rows", "dropped"), ("specvlm", "expert", "pool")])
def test_rows_of_images_by_both_names(tmp_path, kind, name, value):
    """A head that reads images has the setting by its own name, and by the name of config.json."""
    save_head(tmp_path, tiny_head(kind, target()), target=target())
    for spelling in (name, "image_rows"):
        loaded = read_head(tmp_path, target(), settings={spelling: value})
        assert getattr(loaded.head.head.config, name) == loaded.flags[name] == value
    with pytest.raises(UsageError, match=f"setting {name} of the head must be"):
        read_head(tmp_path, target(), settings={name: "other"})
