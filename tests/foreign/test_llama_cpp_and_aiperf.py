"""The speculative tests of llama.cpp's server, and AIPerf's identities between counters, on the HTTP server of specjax.

Sources: llama.cpp (MIT), `tools/server/tests/unit/test_speculative.py` at 0876d42; AIPerf (Apache-2.0), `tests/unit/
spec_decode/test_vllm_adapter.py` at 038b7df, `src/aiperf/common/models/spec_decode_models.py` at 0786f0c and `tests/
unit/metrics/test_spec_decode_metrics.py` at 1849cd1. Inputs and outcomes are facts of them; the code is ours. Both are
in one file, because its tests share one server.

Differences: llama.cpp's models are downloaded, and ours is tiny. The limits of drafts are those of the drafter, because
one server has one family of programs. A prompt that does not fit is refused here, and cut there. Its fields `n_predict`
and `content` are `max_tokens` and `text`.

Cases without meaning here: the shift of llama.cpp's context, because no text is cut; payloads of other engines, phases
of a benchmark, and the tables of AIPerf's console.
"""

import collections
import concurrent.futures
import itertools
import json
import math

import httpx
import pytest
from served import LENGTH, LONGEST, LetterTokenizer, make_target, running

import specjax
from specjax.server.metrics import describe_steps


@pytest.fixture(scope="module")
def http():
    with running(step_metrics="detailed") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


TOKENIZER = LetterTokenizer()
PROMPT = "I believe the meaning of life is"
GREEDY = {"model": "tiny", "temperature": 0.0, "top_k": 1, "max_tokens": 48, "ignore_eos": True}


def post(http, **fields):
    response = http.post("/v1/completions", json=GREEDY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def content(http, **fields):
    return post(http, **fields)["choices"][0]["text"]


def decoded(drafter, prompt, count):
    target, ids = make_target(), TOKENIZER.encode(prompt)
    result = specjax.decode(target, drafter, [ids], key=0, max_new_tokens=count)
    return TOKENIZER.decode(result.to_lists()[0]), int(result.stats.accepted.sum())


def test_with_and_without_drafts(http):
    plain, accepted = decoded(specjax.drafters.autoregressive(), PROMPT, 48)
    answer = post(http, prompt=PROMPT)
    assert answer["choices"][0]["text"] == plain and accepted == 0
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [1, 2, 8, 16])
def test_other_limits_of_drafts(http, number):
    """Theirs are 1 to 2, 1 to 4, 4 to 8, 4 to 12 and 8 to 16 tokens."""
    texts, accepted = decoded(specjax.drafters.prompt_lookup(number, min_ngram=1), PROMPT, 48)
    assert texts == content(http, prompt=PROMPT) and accepted > 0


def test_a_prompt_that_fills_the_context(http):
    """A prompt of as many tokens as a row has is answered, as is the longest answer to it. One more is refused."""
    prompt = ("Hello " * LONGEST)[: LONGEST - 1]  # and the token that begins a text
    answer = post(http, prompt=prompt, max_tokens=LENGTH)
    assert answer["usage"]["prompt_tokens"] == LONGEST and answer["usage"]["completion_tokens"] == LENGTH
    assert len(answer["choices"][0]["text"]) > 0
    response = http.post("/v1/completions", json=GREEDY | {"prompt": prompt + "H"})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("number", [2, 9])
def test_requests_in_parallel(http, number):
    """Send fewer requests than there are slots, and more: each has the text that it has alone."""
    alone = content(http, prompt=PROMPT)
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        texts = list(pool.map(lambda _: content(http, prompt=PROMPT), range(number)))
    assert texts == [alone] * number


COUNTS = "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"


def record_of(payload):
    """Return the histogram of a payload without its zeros, or None where AIPerf's adapter drops the payload."""
    names = {"acceptance_histogram", "mean_acceptance_length", "draft_acceptance_rate", *COUNTS}
    if not isinstance(payload, dict) or names - payload.keys():
        return None
    histogram, longest = payload["acceptance_histogram"], payload.get("num_spec_tokens")
    if not isinstance(histogram, list) or not all(type(x) is int and x >= 0 for x in histogram):
        return None
    steps, accepted, drafted = (payload[name] for name in COUNTS)
    means = payload["mean_acceptance_length"], payload["draft_acceptance_rate"]
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in (steps, accepted, drafted, *means)):
        return None
    of_steps = [payload.get(name) for name in ("per_step_accepted", "per_step_drafted")]
    is_detailed = None not in of_steps
    identities = [
        longest is None or len(histogram) == longest + 1,
        sum(histogram) == steps,
        sum(j * count for j, count in enumerate(histogram)) == accepted,
        0 <= accepted <= drafted,
        not is_detailed or [len(x) for x in of_steps] == [steps, steps],
        not is_detailed or [sum(x) for x in of_steps] == [accepted, drafted],
        not is_detailed or all(a <= d for a, d in zip(*of_steps, strict=False)),
    ]
    return {j: count for j, count in enumerate(histogram) if count} if all(identities) else None


def described(accepted, drafted=4):
    """Return the payload of steps that accepted these numbers of tokens."""
    return describe_steps([(drafted, number) for number in accepted], 4, detailed=True)


def test_the_worked_example():
    """2, 3, 1, 4, 2, 0, 3 and 3 of 4 drafted tokens: 3.25 tokens per step, and 56.25 % of the draft."""
    payload = described([2, 3, 1, 4, 2, 0, 3, 3])
    assert record_of(payload) == {0: 1, 1: 1, 2: 2, 3: 3, 4: 1}
    assert [payload[name] for name in COUNTS] == [8, 18, 32]
    assert payload["mean_acceptance_length"] == 3.25 and payload["draft_acceptance_rate"] == 0.5625
    assert (18 + 8) / (32 + 8) == 0.65  # accepted per verified token


def test_summary_and_detailed_payloads():
    steps = [(3, 0)] * 39 + [(3, 1)] + [(3, 3)] * 3
    summary = describe_steps(steps, 3, detailed=False)
    assert record_of(summary) == {0: 39, 1: 1, 3: 3} and "per_step_accepted" not in summary
    assert summary["mean_acceptance_length"] == pytest.approx(1.2325581395348837)
    assert summary["draft_acceptance_rate"] == pytest.approx(0.07751937984496124)
    detailed = describe_steps([(3, 0), (3, 1), (3, 3), (3, 0)], 3, detailed=True)
    assert record_of(detailed) and detailed["per_step_accepted"] == [0, 1, 3, 0]
    assert detailed["mean_acceptance_length"] == 2 and detailed["draft_acceptance_rate"] == 4 / 12


def test_no_draft_and_no_accepted_token():
    """A request without drafts has a record too: 1 token per step, and no share of drafts."""
    for steps in ([], [(0, 0)] * 5):
        payload = describe_steps(steps, 3, detailed=True)
        assert record_of(payload) == {} and payload["num_spec_steps"] == 0
        assert (payload["mean_acceptance_length"], payload["draft_acceptance_rate"]) == (1.0, 0.0)
    payload = describe_steps([(3, 0)] * 20, 3, detailed=True)
    assert record_of(payload) == {0: 20} and payload["mean_acceptance_length"] == 1.0


BROKEN = {
    "per_step_accepted": [[0, 1, 3], [0, 1, 3, 1]],
    "per_step_drafted": [[3, 3, 3, 4], [3, 3, 2, 4]],
    "acceptance_histogram": [
        [2, 1, 0, "1"], {"0": 2, "1": 1, "3": 1}, "2101", 5, None, [2, 1, None, 1], [2, 1, False, 1], [2, 1, 0.0, 1],
        [2, 1, 1], [2, 1, 0, 1, 0], [-1, 1, 0, 3],
    ],
    "num_spec_steps": [99],
    "num_accepted_draft_tokens": [11],
    "num_draft_tokens": [3],
    "mean_acceptance_length": [None, math.inf],
}  # fmt: skip


def test_broken_payloads_are_dropped():
    """The negative control: each of the adapter's malformed payloads breaks an identity."""
    payload = describe_steps([(3, 0), (3, 1), (3, 3), (3, 0)], 3, detailed=True)
    assert record_of(payload) is not None
    for name, values in BROKEN.items():
        for value in values:
            assert record_of(payload | {name: value}) is None, (name, value)
        assert name.startswith("per_step") or record_of({k: v for k, v in payload.items() if k != name}) is None
    assert record_of({k: v for k, v in payload.items() if k != "num_spec_tokens"}) is not None


SENT = {"model": "tiny", "ignore_eos": True, "max_tokens": 40}
BODIES = [
    {"prompt": "abababab", "temperature": 0},
    {"prompt": "xyxyxyxy", "temperature": 1, "seed": 3},
    {"prompt": "q", "temperature": 1, "seed": 4, "max_tokens": 1},
]


def counters(http):
    lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name.replace('{model_name="tiny",engine="0"', "{"): float(value) for name, _, value in lines}


def payload_of(document):
    return document["metrics"]["speculative_decoding"]


def streamed(http, body):
    """Return the usage and the payload of the last chunk of a stream, the only ones."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = http.post("/v1/completions", json=SENT | body | options).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    *chunks, last = chunks
    assert not any(chunk.get("usage") or chunk.get("metrics") for chunk in chunks) and last["choices"] == []
    return last["usage"], payload_of(last)


def test_the_counters_of_answers_and_of_all_requests(http):
    start = counters(http)
    documents = [http.post("/v1/completions", json=SENT | body).json() for body in BODIES]
    pairs = [(document["usage"], payload_of(document)) for document in documents]
    pairs += [streamed(http, body) for body in BODIES]
    change = {name: value - start.get(name, 0) for name, value in counters(http).items()}
    pooled = collections.Counter()
    for usage, payload in pairs:
        record = record_of(payload)
        assert record is not None
        pooled.update(record)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
        steps, accepted, _ = (payload[name] for name in COUNTS)
        # The last step may accept more tokens than the length leaves room for.
        emitted = accepted + steps + payload["num_plain_steps"]
        assert usage["completion_tokens"] <= emitted <= usage["completion_tokens"] + 3
        assert payload["mean_acceptance_length"] == pytest.approx(1 + accepted / max(steps, 1))
    assert [x[1] for x in pairs[:3]] == [x[1] for x in pairs[3:]]  # a stream has the counters of its answer
    total = lambda name: change[f"vllm:{name}{{}}"]
    assert sum(pooled.values()) == total("spec_decode_num_drafts_total")
    assert sum(j * count for j, count in pooled.items()) == total("spec_decode_num_accepted_tokens_total") > 0
    assert sum(payload["num_draft_tokens"] for _, payload in pairs) == total("spec_decode_num_draft_tokens_total")
    for name in ("prompt", "generation"):
        field = {"prompt": "prompt_tokens", "generation": "completion_tokens"}[name]
        assert sum(usage[field] for usage, _ in pairs) == total(f"{name}_tokens_total")
    # Step counts by position are the tail sums of the pooled histogram.
    of_position = [change[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{,position="{i}"}}'] for i in range(3)]
    tails = list(itertools.accumulate(pooled[j] for j in (3, 2, 1)))[::-1]
    assert of_position == tails
