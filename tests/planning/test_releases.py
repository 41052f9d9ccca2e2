"""Every release compiles for TPUs: whole decodes of real shapes, kernels included, and what is in their programs."""

import pytest
import tpu

from specjax import compile_report, plan
from specjax.planning.compiler import compile_programs
from specjax.planning.workload import make_workload

pytestmark = [pytest.mark.tpu_compile, pytest.mark.exhaustive]  # a third of a minute to two each

SMOLLM2 = ("smollm2_135m", None, {"method": "token_recycling", "num_draft_tokens": 63})
GEMMA3 = ("gemma3_270m", None, {"method": "prompt_lookup"})
LLAMA3 = ("llama3_8b", "llama3_1b", {"tree": "4x2x1", "temperature": 1.0})
ALL = tuple(
    (release, topology, model)
    for release, model in ((SMOLLM2, 1), (GEMMA3, 1), (LLAMA3, 4))
    for topology in ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")
)


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path):
    tpu.devices()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def check(release, topology, model, **options):
    target, draft, method = release
    report = compile_report(target, topology, draft=draft, model=model, context=4096, **method, **options)
    assert report.compiles, [program.reason for program in report.programs]
    for program in report.programs:
        assert program.memory.total < program.memory.available
        # No vocabulary sort, no call of the host, no copy of a cache or of parameters. But a width that is no whole
        # number of tiles (576 of SmolLM2) lets the compiler turn weights, once per program or streamed step of many
        # tokens.
        findings = [finding for finding in program.findings if finding["kind"] != "kernel"]
        allowed = {"copy"} if target == "smollm2_135m" else set()
        assert {finding["kind"] for finding in findings} <= allowed, findings
        assert all(is_weight(finding) for finding in findings), findings
        # Sums of activations, and choices among the devices; never the logits or the cache of another device.
        for collective in program.collectives:
            assert collective["kind"] == "all-reduce" or collective["bytes"] / collective["count"] < 100_000
    step = report.program("plain step")
    assert step.memory.temporaries < 0.05 * step.memory.arguments
    return report


def is_weight(copied) -> bool:
    """Return whether a finding "copies bf16[2,3] 1 times" is a weight: caches have five axes, [layers, B, K, slots, h],
    weights at most 3."""
    return copied["sentence"].split("]")[0].count(",") < 3


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case[0][0]}-{case[1]}")
def test_every_release_on_every_chip(case):
    check(*case)


def test_a_pool_of_ngrams_is_held_in_few_tiles():
    """4096 buckets of 7 places for 5 tokens are 0.6 MB, and 17 where places and tokens are axes of their own."""
    job = make_workload("llama3_8b", "v5e:2x2", model=4, method="lookahead")
    (step,) = compile_programs(job, False, lambda _: None, only=("step",))
    assert step.memory.temporaries < 10e6


def test_70b_on_256_chips():
    """16-way model parallel, with each of the 8 key/value heads twice."""
    report = check(("llama3_70b", None, {"method": "prompt_lookup"}), "v5e:16x16", 16, batch=16, data=16)
    assert report.program("plain step").memory.total > 0.5 * report.program("plain step").memory.available


def test_a_tree_costs_little_more_than_a_token():
    """64 nodes over 4096 cached tokens, against one, from both sides.

    Half of the difference are the sums of 64 rows over the four chips.
    """
    result = plan("llama3_8b", "v5e:2x2", acceptance=(0.6, 0.2, 0.1), widths=(1, 64), context=4096, model=4)
    one, many = (report.seconds for report in result.widths)
    assert many["schedule"] <= 1.10 * one["schedule"]
    assert many["roofline"] <= 1.10 * one["roofline"]
