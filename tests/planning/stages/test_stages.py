"""Attention and feed-forward layers on separate devices, against formulas in NumPy with the sizes of the models."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console
from toy import tiny_llama

from specjax.cli import main
from specjax.costs.chips import CHIPS
from specjax.errors import UsageError
from specjax.planning import plan_stages
from specjax.planning.inputs.model_configs import load_config, num_params
from specjax.planning.stages.parts import parts_of
from specjax.planning.stages.pipeline import balance_nodes, feed_seconds
from specjax.planning.stages.table import show_stages

LLAMA = dict(
    layers=32, width=4096, attention=4096 * 6144 + 4096 * 4096 + 4096, feed=3 * 4096 * 14336 + 4096,
    expert=0, experts=1, chosen=1, heads=32, cached=2 * 8 * 128, outer=2 * 128256 * 4096 + 4096,
)  # fmt: skip
QWEN = dict(
    layers=48, width=2048, attention=2048 * 5120 + 4096 * 2048 + 2 * 128 + 2048, feed=128 * 2048 + 2048,
    expert=3 * 2048 * 768, experts=128, chosen=8, heads=32, cached=2 * 4 * 128, outer=2 * 151936 * 2048 + 2048,
)  # fmt: skip
"""Numbers of one layer, by the configs of the releases: parameters of the parts, and cached numbers per token."""


def oracle(model, chip, devices, batch, nodes, context, attention, micro_batches):
    """Return the seconds of the card's formulas in float64, in bfloat16 with heads of 128 numbers."""
    m = {name: np.float64(value) for name, value in model.items()}
    bandwidth, peak = np.float64(chip.hbm_bandwidth), np.float64(chip.peak_flops)

    def attend(rows):
        weights = np.maximum(2 * m["attention"] / bandwidth, 2 * m["attention"] * rows * nodes / peak)
        flops = 4 * m["heads"] * 128 * rows * context * nodes
        return m["layers"] * (weights + np.maximum(2 * m["cached"] * rows * context / bandwidth, flops / peak))

    def feed(n):
        touched = m["experts"] * (1 - (1 - m["chosen"] / m["experts"]) ** n)
        moved = 2 * (m["feed"] + touched * m["expert"])
        flops = 2 * n * (m["feed"] + m["chosen"] * m["expert"])
        return m["layers"] * np.maximum(moved / bandwidth, flops / peak)

    feeders = devices - attention
    rows = np.ceil(batch / micro_batches)
    a, f = attend(np.ceil(rows / attention)), feed(rows * nodes) / feeders
    links = np.minimum(attention, feeders) * 2 * chip.link_bandwidth
    c = m["layers"] * (2 * rows * nodes * m["width"] / links + 1e-6)
    period = np.max([a, f, c])
    step = np.maximum(micro_batches * period, a + f + 2 * c)
    together = attend(np.ceil(batch / devices)), feed(batch * nodes) / devices
    return dict(a=a * micro_batches, f=f * micro_batches, c=c * micro_batches, step=step, together=together)


@pytest.mark.parametrize(
    ("name", "model", "topology", "batch", "context", "slots"),
    [("llama3_8b", LLAMA, "v5e:2x4", 40, 3900, 4096), ("qwen3_30b_a3b", QWEN, "v6e:2x4", 64, 8000, 8192)],
)
def test_the_plan_is_that_of_the_formulas(name, model, topology, batch, context, slots):
    plan, chip = plan_stages(name, topology, batch=batch, context=context, widths=(16,)), CHIPS[topology[:3]]
    assert [row.nodes for row in plan.rows] == [1, 16] and plan.devices == 8
    for row in plan.rows:
        args = (model, chip, 8, batch, row.nodes, context)
        best = row.split
        want = oracle(*args, best.attention_devices, best.micro_batches)
        got = best.attention_seconds, best.feed_seconds, best.transfer_seconds, best.step_seconds
        np.testing.assert_allclose(got, [want["a"], want["f"], want["c"], want["step"]], rtol=1e-9)
        np.testing.assert_allclose([row.attention_seconds, row.feed_seconds], want["together"], rtol=1e-9)
        np.testing.assert_allclose(row.ratio, sum(want["together"]) / want["step"], rtol=1e-9)
        assert row.ratio_with_exchange > row.ratio
        fits = [a for a in range(1, 8) if fits_in(model, chip, 8, a, batch, slots)]
        every = [oracle(*args, a, count)["step"] for a in fits for count in range(1, 9)]
        np.testing.assert_allclose(best.step_seconds, min(every), rtol=1e-9)


def fits_in(model, chip, devices, attention, batch, slots):
    """Return True for a division that is far from the limit of memory. Raises: AssertionError near the limit."""
    weights = 2 * model["layers"] * (model["feed"] + model["experts"] * model["expert"]) / (devices - attention)
    rows = -(-batch // attention)
    cache = 2 * model["layers"] * rows * slots * model["cached"]
    other = 2 * model["layers"] * model["attention"] + 2 * model["outer"] / attention + cache
    share = max(weights, other) / chip.hbm_bytes
    assert abs(share - 0.975) > 0.05, f"choose another batch: {share}"
    return share < 0.975


def test_the_parts_are_all_parameters_of_a_model():
    for name in ("llama3_8b", "qwen3_30b_a3b", "gpt_oss_20b", "qwen3_next_80b"):
        config = load_config(name, "bfloat16")
        parts = parts_of(config, 4096)
        layers = parts.attention.params + parts.feed.params + parts.experts.params
        assert layers + parts.outer / 2 == num_params(config)
        assert (parts.experts.bytes > 0) == (config.experts is not None) and parts.attention.bytes < parts.outer * 50
    assert parts.state_bytes > 0, "recurrent layers of Qwen3-Next have states"
    sparse = parts_of(load_config("gpt_oss_20b", "bfloat16"), 4096)
    assert sparse.context == (4096 + 128) / 2, "every other layer has a window of 128 tokens"
    small = parts_of(load_config("llama3_8b", "float32"), 4096)
    assert small.is_float32 and small.attention.bytes == 4 * small.attention.params


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b"])
def test_nodes_move_the_balance_to_the_feed_forward_part(name):
    plan = plan_stages(name, "v6e:2x4", batch=32, context=8000)
    shares = [row.feed_seconds / row.together_seconds for row in plan.rows]
    assert shares == sorted(shares) and shares[-1] > shares[0]
    assert len({row.attention_seconds for row in plan.rows}) == 1, "the cache is read once for all nodes"
    for row in plan.rows:
        assert row.balance_rows == pytest.approx(plan.rows[0].balance_rows / row.nodes)
    groups = [row.split.feed_devices for row in plan.rows]
    assert groups == sorted(groups) and (groups[-1] > groups[0] or name != "llama3_8b")


def test_the_balance_of_a_dense_model_is_peak_over_bandwidth():
    """Each parameter of two bytes takes two FLOPs per node."""
    chip, config = CHIPS["v5e"], load_config("llama3_8b", "bfloat16")
    parts = parts_of(config, 4096)
    nodes = balance_nodes(parts, chip)
    assert nodes == pytest.approx(197e12 / 8.19e11)
    assert feed_seconds(parts, chip, nodes / 2) == pytest.approx(feed_seconds(parts, chip, nodes))
    assert feed_seconds(parts, chip, 2 * nodes) == pytest.approx(2 * feed_seconds(parts, chip, nodes))
    mixture = balance_nodes(parts_of(load_config("qwen3_30b_a3b", "bfloat16"), 4096), chip)
    assert mixture == pytest.approx(nodes * 128 / 8, rel=0.02), "each expert reads k / E of the nodes"


def test_a_dense_model_at_4096_tokens_is_not_faster_on_separate_devices():
    for row in plan_stages("llama3_8b", "v5e:2x4", batch=64, context=4000).rows:
        assert row.ratio < 1 and row.together_fits


def test_a_micro_batch_alone_passes_the_stages_in_turn():
    """The stages of a single micro-batch do not overlap."""
    for row in plan_stages("llama3_8b", "v5e:2x4", batch=8, context=1024, micro_batches=1).rows:
        split = row.split
        parts = split.attention_seconds + split.feed_seconds + 2 * split.transfer_seconds
        assert split.micro_batches == 1 and split.step_seconds == pytest.approx(parts)
    four = plan_stages("llama3_8b", "v5e:2x4", batch=64, context=1024, micro_batches=4).rows[0].split
    assert four.step_seconds >= 4 * 32 * four.period_seconds * (1 - 1e-9)


def test_the_command_prints_the_plan_of_the_function(capsys):
    flags = ["--target", "gpt_oss_20b", "--topology", "v6e:2x4", "--batch-size", "64", "--context", "8192"]
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--stages", *flags, "--json"])
    assert stop.value.code == 0
    plan = plan_stages("gpt_oss_20b", "v6e:2x4", batch=64, context=8192)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(plan.to_json()))
    assert plan.experts == (32, 4) and "no link was measured" in plan.limits
    out = io.StringIO()
    show_stages(plan, Console(file=out, width=80))
    rows = [line for line in out.getvalue().splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == 7 and "…" not in out.getvalue()
    assert f"{plan.rows[0].split.attention_devices}:{plan.rows[0].split.feed_devices}" in rows[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topology", "v6e:1x1"], "v6e:1x1 is one device, and two stages need two; give more chips, such as v6e:2x2"),
        (["--topology", "v4:1x1x1"], "such as v4:2x2x1"),
        (["--batch-size", "4", "--micro-batches", "5"], "from 1 to the 4 rows of --batch-size, not 5"),
        (["--micro-batches", "0"], "--micro-batches must be a number from 1"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--batch-size", "20000"], "no division of the 8 devices of v6e:2x4 has room for gpt-oss-20b"),
        (["--draft", "llama3_1b"], "--stages counts target passes only and has no --draft"),
        (["--acceptance", ".5"], "--stages counts target passes only and has no --acceptance"),
        (["--model", "2"], "--stages divides the devices itself and has no --model"),
        (["--expert", "2"], "--stages divides the devices itself and has no --expert"),
        (["--widths", "1,1000"], "--widths must be numbers from 1 to 512"),
        (["--widths", "one"], "--widths must be numbers joined by commas"),
        (["--fits"], "--fits, --stages and --memory are different reports"),
        (["--target", "mamba2_780m"], "has no feed-forward layers"),
        (["--target", "llada_8b"], "is a diffusion model, which --stages does not plan"),
    ],
)
def test_errors_are_one_sentence(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--stages", "--target", "gpt_oss_20b", "--topology", "v6e:2x4", *flags])
    error = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and words in error and "Traceback" not in error, error


def test_micro_batches_need_stages(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--target", "llama3_8b", "--topology", "v5e:2x4", "--micro-batches", "2"])
    assert stop.value.code == 2 and "--micro-batches applies only to --stages" in capsys.readouterr().err


STAGES = ["compile", "--stages", "1:1", "--target", "qwen3_30b_a3b", "--topology", "v5e:2x4"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--stages", "4"], '--stages must be two numbers of devices, such as 2:6, not "4"'),
        (["--stages", "4:5"], "--stages 4:5 needs at least one device of each stage and at most the 8 of v5e:2x4"),
        (["--stages", "0:4"], "--stages 0:4 needs at least one device"),
        (["--stages", "2:3"], "3 feed-forward devices do not divide the 128 experts of qwen3-30b-a3b; give a divisor"),
        (["--stages", "2:3", "--target", "llama3_8b"], "do not divide the 14336 hidden units of llama3-8b"),
        (["--draft", "llama3_1b"], "--stages counts target passes only and has no --draft"),
        (["--expert", "2"], "--stages divides the devices itself and has no --expert"),
        (["--widths", "one"], "--widths must be numbers joined by commas"),
        (["--widths", ""], "--widths must be numbers joined by commas"),
        (["--num-draft-tokens", "0"], "--stages counts target passes only and has no --num-draft-tokens"),
        (["--target", "mamba2_780m"], "mamba2-780m has no feed-forward layers, so it has no two stages"),
        (["--target", "llada_8b"], "is a diffusion model, whose stages are not compiled"),
    ],
)
def test_compiled_stages_refuse_in_one_sentence(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*STAGES, *flags])
    error = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and words in error and "Traceback" not in error, error


def test_widths_of_compile_need_stages(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compile", "--target", "llama3_8b", "--topology", "v5e:2x4", "--widths", "1,2"])
    assert stop.value.code == 2 and "--widths applies only to --stages" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("model", 2), ("tree", "2x2"), ("draft", "llama3_1b")])
def test_the_function_refuses_meshes_and_drafts(name, value):
    with pytest.raises(UsageError, match=f"has no {name}; leave it out"):
        plan_stages("llama3_8b", "v5e:2x4", **{name: value})


def test_a_config_and_a_quantised_model_are_planned():
    config = dataclasses.replace(tiny_llama().model.config, dtype="bfloat16")
    tiny = plan_stages(config, "h200:2", batch=4, context=32, max_new_tokens=4)
    assert tiny.target == config.name and tiny.rows[0].split.feed_devices == 1
    kinds = {scheme: plan_stages("llama3_8b", "v5e:2x4", batch=8, quantize=scheme).rows[0] for scheme in (None, "int8")}
    assert kinds["int8"].feed_seconds == pytest.approx(kinds[None].feed_seconds / 2, rel=0.01)
