"""Estimates from shapes of the models that fit on chips."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console
from tiers import exhaustive

from specjax.cli import main
from specjax.costs.chips import CHIPS
from specjax.errors import UsageError
from specjax.files.sizes import GIB
from specjax.models import abstract_params
from specjax.models.heads.kinds import abstract_head
from specjax.models.loading import resolve
from specjax.models.storage import num_bytes
from specjax.planning import what_fits
from specjax.planning.inputs.model_configs import builtin_configs
from specjax.planning.memory import slots_of
from specjax.planning.reports import fits as fits_module
from specjax.planning.reports.fits_table import show_fits
from specjax.planning.workload import make_workload

QUICK = {"dream_7b", "gpt_oss_20b", "llama3_1b", "llama3_8b", "llama3_70b", "qwen2_5_coder_1_5b", "qwen3_5_0_8b"}
"""Each kind of model, and those that tests name. All built-in configs take a minute."""


@pytest.fixture(scope="module", params=[pytest.param(QUICK, id="quick"), exhaustive(set(builtin_configs()), id="all")])
def colab(request):
    """Return the estimates of built-in configs for one v5e chip, as in Colab."""
    configs = {name: make for name, make in builtin_configs().items() if name in request.param}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fits_module, "builtin_configs", lambda: configs)
        return what_fits("v5e:1x1")


def test_every_built_in_config_has_a_row_for_each_dtype(colab, request):
    plain = [fit for fit in colab.models if fit.scheme is None]
    names = QUICK if "quick" in request.node.callspec.id else set(builtin_configs())
    assert [(fit.target, fit.dtype) for fit in plain] == [
        (name, dtype) for name in builtin_configs() if name in names for dtype in ("bfloat16", "float32")
    ]
    for fit in colab.models:
        params = abstract_params(dataclasses.replace(builtin_configs()[fit.target](), dtype=fit.dtype))
        assert fit.scheme or fit.weights_bytes == num_bytes(params)
        assert (fit.num_nodes is None) == (fit.target in ("dream_7b", "llada_8b", "sdar_4b"))
        assert bool(fit.reason) == (fit.largest_context < colab.context)
        if fit.reason:
            assert not fit.num_nodes and f"of {0.975 * CHIPS['v5e'].hbm_bytes / GIB:.2f} GiB" in fit.reason
        else:
            assert fit.weights_bytes < fit.needed_bytes < CHIPS["v5e"].hbm_bytes


def test_a_large_model_fits_in_half_precision_only(colab):
    fits = {(fit.target, fit.dtype): fit for fit in colab.models if fit.scheme is None}
    assert not fits["qwen2_5_coder_1_5b", "float32"].reason and not fits["llama3_8b", "bfloat16"].reason
    assert fits["llama3_8b", "float32"].reason and fits["llama3_70b", "bfloat16"].reason
    assert fits["llama3_1b", "float32"].largest_context < fits["llama3_1b", "bfloat16"].largest_context


def test_the_longest_prompt_is_the_longest():
    one = what_fits("v5e:1x1", target="llama3_1b", dtype="float32")
    longest = one.models[0].largest_context
    assert not what_fits("v5e:1x1", target="llama3_1b", dtype="float32", context=longest).models[0].reason
    assert what_fits("v5e:1x1", target="llama3_1b", dtype="float32", context=longest + 1).models[0].reason
    quantised = what_fits("v5e:1x1", target="llama3_1b", dtype="float32", cache_dtype="int8")
    assert quantised.cache_dtype == "int8" and quantised.models[0].largest_context > longest


@pytest.mark.parametrize(("batch", "nodes"), [(1, 32), (8, 4), (64, 2)])
def test_more_rows_leave_room_for_smaller_trees(batch, nodes):
    (fit,) = what_fits("v5e:1x1", target="smollm2_135m", dtype="bfloat16", batch=batch).models
    assert fit.num_nodes == nodes


@pytest.mark.parametrize(
    ("target", "dtype", "context", "compiled"),
    [
        ("llama3_8b", "bfloat16", 1900, 15.34),
        ("gemma3_270m", "bfloat16", 30000, 1.06),
        ("llama3_1b", "float32", 60000, 12.76),
        ("llama3_1b", "float32", 30000, 8.75),
        ("smollm2_135m", "float32", 8000, 1.60),
    ],
)
def test_the_estimate_is_close_to_the_compiler(target, dtype, context, compiled):
    """The reserve covers the difference to the GiB of the complete decode, compiled for v5e by libtpu 0.0.42."""
    (fit,) = what_fits("v5e:1x1", target=target, dtype=dtype, context=context).models
    assert -0.02 * GIB < compiled * GIB - fit.needed_bytes < 0.03 * CHIPS["v5e"].hbm_bytes


def test_logits_limit_the_tree():
    options = dict(target="gemma3_270m", dtype="bfloat16", context=64)
    (fit,) = what_fits("v5e:1x1", **options, device_bytes=int(0.62 * GIB)).models
    assert not fit.reason and 1 <= fit.num_nodes < 64


def test_a_prompt_beyond_the_limit_of_a_model():
    (fit,) = what_fits("v5e:1x1", target="smollm2_135m", dtype="float32", context=9000).models
    assert fit.reason == "its texts have at most 8192 tokens" and fit.num_nodes == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "nothing"}, ("--target", "llama3_8b")),
        ({"dtype": "int8"}, ("--dtype",)),
        ({"batch": 0}, ("--batch-size",)),
        ({"context": 0}, ("--context",)),
        ({"draft": "llama3_1b"}, ("draft", "leave it out")),
        ({"draft": "native"}, ("--draft native", "no multi-token-prediction module")),
        ({"method": "suffix"}, ("--method suffix", "leave the other out")),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(UsageError) as refusal:
        what_fits("v5e:1x1", **{"target": "smollm2_135m"} | options)
    assert all(word in str(refusal.value) for word in words)


def test_the_module_of_a_model_counts():
    """Check its weights, and a layer of keys and values for each token."""
    options = {"target": "qwen3_5_0_8b", "dtype": "bfloat16"}
    (one,) = what_fits("v5e:1x1", **options).models
    (plain,) = what_fits("v5e:1x1", **options, method="autoregressive").models
    work = make_workload(options["target"], "v5e:1x1")
    head = abstract_head("mtp", work.head)
    assert one == what_fits("v5e:1x1", **options, draft="native").models[0]
    assert (one.module_bytes, plain.module_bytes) == (num_bytes(head.params), 0)
    layer = 2 * 2 * 256 * 2  # keys and values of 2 heads of 256 numbers, in bfloat16
    assert one.needed_bytes - plain.needed_bytes - one.module_bytes == slots_of(work, 1024, 1) * layer
    assert (one.weights_bytes, one.step_seconds) == (plain.weights_bytes, plain.step_seconds)
    assert one.largest_context < plain.largest_context or plain.largest_context == 262_144 - 128


def test_native_lists_the_models_with_a_module(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--fits", "--topology", "v5e:1x1", "--draft", "native", "--json"])
    models = json.loads(capsys.readouterr().out)["models"]
    assert not stop.value.code and all(model["module_bytes"] for model in models)
    assert {model["target"] for model in models} == {"qwen3_5_0_8b", "qwen3_5_4b", "qwen3_5_9b", "qwen3_next_80b"}
    out = io.StringIO()
    show_fits(what_fits("v5e:1x1", target="qwen3_5_0_8b", dtype="bfloat16"), Console(file=out, width=80))
    assert "with its own module" in out.getvalue()


def test_the_command_prints_the_same(colab, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--fits", "--topology", "v5e:1x1", "--target", "llama3_8b", "--json"])
    assert stop.value.code == 0
    record = what_fits("v5e:1x1", target="llama3_8b").to_json()
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(record))


def test_the_table_is_narrow(colab):
    out = io.StringIO()
    show_fits(colab, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    forms = {fit.scheme or fit.dtype for fit in colab.models}
    rows = [line for line in lines if forms & set(line.split()[1:2])]
    assert len(rows) == len(colab.models) and max(map(len, rows)) <= 80 and "…" not in out.getvalue()
    row = next(line for line in rows if "llama3_8b" in line and "bfloat16" in line)
    (fit,) = [fit for fit in colab.models if (fit.target, fit.dtype) == ("llama3_8b", "bfloat16") and not fit.scheme]
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in out.getvalue()
    show_fits(what_fits("h200:1", target="llama3_8b"), Console(file=out, width=80))
    assert "JAX reserves 75% of a GPU by default; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.98" in out.getvalue()
    assert "yes" in row and f"{fit.largest_context:,}" in row


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fits", "--acceptance", ".5"], ("--fits", "--acceptance")),
        (["--fits", "--draft", "llama3_1b"], ("--fits", "--draft")),
        (["--fits", "--draft", "native", "--draft", "native"], ("--draft", "leave the others out")),
        (["--fits", "--widths", "1,2"], ("--fits", "--widths")),
        (["--acceptance", ".5"], ("--target", "--fits")),
    ],
)
def test_flags_that_do_not_go_together(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--topology", "v5e:1x1", *flags])
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert all(word in line for word in words), line


def test_schemes_are_proposed_where_bfloat16_does_not_fit(colab):
    fits = {(fit.target, fit.scheme): fit for fit in colab.models if fit.dtype == "bfloat16"}
    for (name, scheme), fit in fits.items():
        assert scheme is None or fits[name, None].reason, f"{name} fits in bfloat16, and {scheme} was proposed"
        assert bool(fits[name, None].reason) == ((name, "int8") in fits)
        assert fit.weights_bytes <= fits[name, None].weights_bytes
    small = fits["llama3_70b", "int4-weights"]
    assert small.reason and 0.26 < small.weights_bytes / fits["llama3_70b", None].weights_bytes < 0.28


def test_a_target_has_a_row_for_every_scheme():
    fits = {fit.scheme or fit.dtype: fit for fit in what_fits("v5e:1x1", target="llama3_8b", context=8000).models}
    assert list(fits) == ["bfloat16", "float32", "int8", "int8-weights", "int4-weights", "fp8"]
    assert fits["bfloat16"].reason and not fits["int8"].reason and not fits["int4-weights"].reason
    assert fits["int4-weights"].largest_context > fits["int8"].largest_context > fits["bfloat16"].largest_context
    [eight] = what_fits("v5e:1x1", target="llama3_8b", quantize="int8", context=8000).models
    assert eight == fits["int8"] and 0.5 < eight.weights_bytes / fits["bfloat16"].weights_bytes < 0.51
    with pytest.raises(UsageError, match="--quantize must be one of"):
        what_fits("v5e:1x1", target="llama3_8b", quantize="int3")


def test_a_quantised_file_has_a_row_in_its_own_formats(capsys):
    """SmolLM2 has a GGUF file in few bits."""
    file = str(resolve(None))
    options = {"target": file, "dtype": "bfloat16"}
    fits = what_fits("v5e:1x1", **options)
    [expanded] = what_fits("v5e:1x1", **options, keep_quantized=False).models
    [stored] = fits.models
    assert (stored.scheme, expanded.formats) == (None, None) and "groups of 32" in stored.formats
    assert expanded.weights_bytes > 2 * stored.weights_bytes
    out = io.StringIO()
    show_fits(fits, Console(file=out, width=200))
    assert "file, bfloat16" in out.getvalue() and stored.formats in out.getvalue()
    with pytest.raises(SystemExit):
        main(["plan", "--fits", "--topology", "v5e:1x1", "--target", file, "--quantize", "int8", "--keep-quantized"])
    assert "leave one out" in capsys.readouterr().err
