"""Requests in the slots of a running batch: every text is the one that its request would have alone."""

import dataclasses
import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import those
from toy import markov, tiny_llama, tiny_llama_alike

import specjax
from specjax import Request, UsageError, controllers, decode, drafters, serve, trees
from specjax.controllers.spec_kv import Weights
from specjax.engine.prepare import Settings, prepare
from specjax.serving import admission, loop
from specjax.serving import batch as module
from specjax.types import Drafter

LIMITS = {"slots": 2, "longest_prompt": 12, "max_new_tokens": 14}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], [7, 8, 7, 8, 7], [9, 1], [3] * 12]
COUNTS = [14, 3, 9, 1, 14]


def request(i):
    return Request(PROMPTS[i], jax.random.key(i), COUNTS[i])


def served(drafter, order, target=None, limits=LIMITS, **options):
    """Texts and reasons by the number of the request's prompt."""
    texts, reasons = {i: [] for i in order}, {}
    for news in serve(target or tiny_llama(), drafter, (request(i) for i in order), **limits, **options):
        assert news.accepted <= len(news.tokens) and order[news.request] not in reasons
        texts[order[news.request]] += news.tokens
        if news.finish_reason:
            reasons[order[news.request]] = news.finish_reason
    return texts, reasons


@functools.cache
def alone(name, i, **options):
    """Return the text of request i alone, as many tokens as it asks for."""
    drafter, key = DRAFTERS[name](), jax.random.key(i)[None]
    text = decode(tiny_llama(), drafter, [PROMPTS[i]], key=key, max_new_tokens=LIMITS["max_new_tokens"], **options)
    return text.to_lists()[0][: COUNTS[i]]


DRAFTERS = {
    "autoregressive": drafters.autoregressive,
    "prompt_lookup": lambda: drafters.prompt_lookup(3, min_ngram=1),
    "token_recycling": lambda: drafters.token_recycling(64, num_nodes=7, read_prompt=True),
    "two_model": lambda: drafters.two_model(tiny_llama(seed=1, layers=1), 3),
    "close": lambda: drafters.two_model(tiny_llama(), 3),
    "auto": lambda: drafters.auto(64, costs=(1.0, 1.0, 1.0, 1.0)),
}


OF_EACH_KIND = ("two_model", 1.0), ("token_recycling", 0.0), ("auto", 1.0)


@pytest.mark.parametrize("setting", those(OF_EACH_KIND, itertools.product(DRAFTERS, (0.0, 1.0))))
def test_texts_do_not_depend_on_when_requests_come(setting):
    name, temperature = setting
    options = {"temperature": temperature, "sampling": "coupled" if temperature else "speculative"}
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        texts, reasons = served(DRAFTERS[name](), order, **options)
        assert texts == {i: alone(name, i, **options) for i in order}
        assert set(reasons.values()) == {"length"}


TREES = {
    "two_model": lambda: drafters.two_model(tiny_llama_alike(), tree=trees.branching("3x2x1")),
    "stand": lambda: drafters.stand(64, num_nodes=12, buckets=64),
}


def without_export(drafter: Drafter) -> Drafter:
    return drafter.replace(hooks=drafter.hooks._replace(export=None))


@pytest.mark.parametrize("name", those(("two_model",), TREES))
def test_rows_draft_as_they_would_alone(name):
    """A request finds nothing of the row before in the draft model's cache, and what is greedy branches."""
    order, accepted = [2, 0, 3, 4], {0: 0, 4: 0}
    # A sampled one beside them: else all are judged by the greedy rule alone.
    requests = [Request([5], jax.random.key(9), 14, temperature=1.0), *map(request, order)]
    for news in serve(tiny_llama(), without_export(TREES[name]()), requests, **LIMITS | {"slots": 3}):
        if news.request and order[news.request - 1] in accepted:
            accepted[order[news.request - 1]] += news.accepted
    wanted = {}
    for i in accepted:
        key = jax.random.key(i)[None]
        stats = decode(tiny_llama(), TREES[name](), [PROMPTS[i]], key=key, max_new_tokens=COUNTS[i]).stats
        wanted[i] = int(stats.accepted[0])
    assert accepted == wanted and sum(wanted.values()) > 4


@pytest.mark.parametrize("slowdown, may_idle", [(float("inf"), False), (1.0, True)])
def test_without_a_limit_of_the_slowdown_no_row_waits_for_its_prompt(monkeypatch, slowdown, may_idle):
    """Rows that have a request decode in every step, and the texts stay the same. A slowdown of 1 lets them wait."""
    idle, step = [], module.Batch.step

    def counted(self):
        idle.append(self.is_decoding and self.is_reading)
        return step(self)

    monkeypatch.setattr(module.Batch, "step", counted)
    texts, _ = served(DRAFTERS["autoregressive"](), [0, 1, 2, 3, 4], limits=LIMITS | {"max_slowdown": slowdown})
    assert texts == {i: alone("autoregressive", i) for i in range(5)}
    assert any(idle) == may_idle


def test_one_slot_and_more_slots_than_requests():
    for slots in (1, 8):
        texts, _ = served(DRAFTERS["token_recycling"](), [2, 0, 1], limits=LIMITS | {"slots": slots})
        assert texts == {i: alone("token_recycling", i) for i in (0, 1, 2)}


def test_a_row_ends_with_its_eos():
    text = alone("prompt_lookup", 0)
    eos = next(token for token in text[4:] if token not in text[:4])
    texts, reasons = served(DRAFTERS["prompt_lookup"](), [0, 1, 2], eos=eos)
    assert texts[0] == text[: text.index(eos) + 1] and reasons[0] == "eos"
    assert texts == {i: alone("prompt_lookup", i, eos=eos) for i in (0, 1, 2)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("data, model", [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_over_a_mesh(data, model):
    """Rows are split over "data", and prompts of one row are read by all of its devices."""
    target = specjax.shard(tiny_llama(), specjax.mesh(data=data, model=model))
    texts, _ = served(DRAFTERS["token_recycling"](), [0, 1, 2, 3], target)
    assert texts == {i: alone("token_recycling", i) for i in range(4)}


@pytest.mark.exhaustive
def test_over_a_mesh_prompts_are_read_in_chunks_and_prefixes_are_copied():
    prompts = [np.random.default_rng(0).integers(1, 60, count).tolist() for count in (70, 3, 130, 140)]
    prompts[3][:64] = prompts[2][:64]
    limits = {"slots": 2, "longest_prompt": 150, "max_new_tokens": 10}
    results = []
    for mesh in (None, specjax.mesh(data=2, model=2)):
        target, texts, cached = tiny_llama(layers=1), {}, {}
        target = target if mesh is None else specjax.shard(target, mesh)
        requests = [Request(prompt, number) for number, prompt in enumerate(prompts)]
        for update in serve(target, "prompt_lookup", requests, **limits):
            texts.setdefault(update.request, []).extend(update.tokens)
            cached[update.request] = update.cached
        results.append((texts, cached))
    assert results[0] == results[1] and results[0][1] == {0: 0, 1: 0, 2: 0, 3: 64}


def test_over_a_mesh_a_row_enters_without_communication():
    """Each device keeps its own rows of the cache, and nothing of it is moved."""
    target = specjax.shard(tiny_llama(layers=1), specjax.mesh(data=2, model=1))
    setup = specjax.serve(target, "autoregressive", slots=4, longest_prompt=12, max_new_tokens=4).setup
    batch = setup.scheduler().batch
    assert jax.tree.leaves(batch._state.cache)[0].sharding.spec[0] == "data"
    packed = admission.pack_request(batch._state.tokens.shape[1], 0, request(0), jax.random.key(0)[None], 4, [])
    row = admission.begin(batch._parts, packed)
    text = admission.enter.lower(batch._parts, batch._state, row, np.int32(1)).compile().as_text()
    assert not any(words in text for words in ("all-gather(", "all-reduce(", "all-to-all(", "collective-permute("))


def test_over_a_mesh_all_is_compiled_by_the_end_of_the_first_request(caplog):
    """Every program leaves the state where it, and the others, found it. `_cache_size` counts ways in, not programs."""
    target = specjax.shard(tiny_llama(layers=1), specjax.mesh(data=1, model=2))
    compiled, ended = [], []
    with jax.log_compiles():
        for news in serve(target, DRAFTERS["token_recycling"](), [request(3), request(1), request(0)], **LIMITS):
            compiled.append(sum(record.message.startswith("Compiling") for record in caplog.records))
            ended.append(news.finish_reason is not None)
    assert sum(ended) == 3 and compiled[-1] == compiled[ended.index(True)] > 2


@pytest.mark.parametrize("data", [1, 2])
def test_a_step_transfers_nothing_to_the_device(monkeypatch, data):
    """The settings of the rows and the automata are on all devices, also after requests with others have come."""
    step, count = module.SERVING.traced.step, []

    def guarded(parts, state):
        count.append(0)
        with jax.transfer_guard_host_to_device("disallow_explicit"), jax.transfer_guard_device_to_device("disallow"):
            return step(parts, state)

    monkeypatch.setattr(module, "SERVING", module.SERVING._replace(traced=module.SERVING.traced._replace(step=guarded)))
    requests = [request(0), request(1)._replace(temperature=0.5, eos=3), request(2)]
    target, drafter, options = tiny_llama(), DRAFTERS["prompt_lookup"](), LIMITS
    if data > 1:
        target = specjax.shard(tiny_llama(layers=1), specjax.mesh(data=data, model=1))
        drafter, options = "autoregressive", LIMITS | {"constraint_mib": 0.1}
    reasons = [news.finish_reason for news in serve(target, drafter, requests, **options)]
    assert sum(map(bool, reasons)) == 3 and len(count) > 3


def test_nothing_of_the_row_before_is_left(monkeypatch):
    """The texts are the same where every free row is full of NaN before a request comes."""
    enter = admission.enter

    def poisoned(parts, state, row, slot):
        spoil = lambda x: x.at[slot].set(jnp.nan) if x.dtype == jnp.float32 and x.ndim > 2 else x
        return enter(parts, state._replace(cache=jax.tree.map(spoil, state.cache)), row, slot)

    programs = module.SERVING.traced._replace(enter=poisoned)
    monkeypatch.setattr(module, "SERVING", module.SERVING._replace(traced=programs))
    texts, _ = served(DRAFTERS["two_model"](), [0, 1, 2, 3, 4])
    assert texts == {i: alone("two_model", i) for i in range(5)}


def test_a_second_batch_of_requests_compiles_nothing():
    served(DRAFTERS["prompt_lookup"](), [0, 1])
    sizes = lambda: [
        f._cache_size() for f in (admission.begin, admission.read, admission.enter, module._empty, module.step)
    ]
    num_programs = sizes()
    served(DRAFTERS["prompt_lookup"](), [4, 3, 2, 1])
    assert sizes() == num_programs and min(num_programs) > 0


def test_what_rows_share_is_kept_and_what_is_theirs_is_new():
    """Goodput's rates are of all rows; those of a row begin anew with its request."""
    prompts = np.zeros((2, 4), np.int32), np.ones(2, np.int32)
    settings = Settings(controller=controllers.goodput(costs=(1.0,) * 6))
    key = jax.random.key(0)
    job = prepare(tiny_llama(), DRAFTERS["prompt_lookup"](), prompts, settings, key=key, max_new_tokens=4)
    _, state = module._empty(job)
    used = state._replace(control=jax.tree.map(lambda x: x + 1, state.control))
    parts = dataclasses.replace(job.parts, eos=np.zeros((2, 0), np.int32))
    request = Request([3, 4], jax.random.key(7))
    packed = admission.pack_request(used.tokens.shape[1], 1, request, jax.random.split(key, 1), 4, [])
    admitted_state = admission.enter(parts, used, admission.begin(parts, packed), packed.slot)
    control, start = admitted_state.control, state.control
    np.testing.assert_array_equal(control.rate, start.rate + 1)
    np.testing.assert_array_equal(control.visits, start.visits + jnp.array([[1], [0]]))
    assert admitted_state.length.tolist() == [1, 2] and admitted_state.done.tolist() == [True, False]


def test_it_waits_for_requests_that_have_not_come_yet():
    """None: nothing is there yet. The others go on meanwhile."""

    def arrivals():
        yield request(0)
        yield from (None, None)
        yield request(1)
        for i in (2, 3, 4):
            yield None
            yield request(i)

    texts = {i: [] for i in range(5)}
    for news in serve(tiny_llama(), DRAFTERS["prompt_lookup"](), arrivals(), **LIMITS):
        texts[news.request] += news.tokens
    assert texts == {i: alone("prompt_lookup", i) for i in range(5)}


class TwoHosts:
    """The exchanges of two hosts, each a thread of this process."""

    def __init__(self):
        self.values, self.barrier = {}, threading.Barrier(2, timeout=120)

    def exchange(self, value):
        self.values[threading.current_thread().name] = value
        self.barrier.wait()
        values = dict(self.values)
        self.barrier.wait()
        return values["0"], values["1"]

    def choose_first(self, value):
        return self.exchange(value)[0]

    def check_same(self, value, what):
        first, second = self.exchange(repr(value))
        if first != second:
            raise UsageError(f"the {what} differ")


def polled(monkeypatch, *sources):
    """Return what each of two hosts admits, poll by poll."""
    monkeypatch.setattr(loop, "hosts", TwoHosts())

    def drain(items):
        source, polls = loop._Source(items, is_shared=True), []
        try:
            while source.has_more:
                polls.append(source.poll())
        except UsageError as error:
            polls.append(str(error))
        return polls

    def run(name, items):
        threading.current_thread().name = name
        return drain(items)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, "01", sources))


def test_on_several_hosts_host_0_decides_when_a_request_comes(monkeypatch):
    a, b = request(0), request(1)
    for other in ([a, b], [None, None, None, a, None, b, None], [a, None, b], [None, a, b, None, None]):
        first, second = polled(monkeypatch, [None, a, None, None, b], other)
        assert first == second == [None, a, None, None, b, None]
    for other in ([a], [a, b, a], [b, a], []):
        first, second = polled(monkeypatch, [a, None, b], other)
        assert first == second and first[-1] == "the requests differ"


def test_what_does_not_fit_is_refused_and_the_others_go_on():
    key = jax.random.key(0)
    wrong = [Request([], key), Request([1] * 13, key), Request([1], key, 15), Request([1], key, 0)]
    news = list(serve(tiny_llama(), DRAFTERS["prompt_lookup"](), [*wrong, request(1)], **LIMITS))
    refused = {n.request: n.error for n in news if n.finish_reason == "refused"}
    assert sorted(refused) == [0, 1, 2, 3]
    assert refused[1] == "its prompt has 13 tokens, not 1 to longest_prompt (12)"
    assert refused[2] == "its max_new_tokens is 15, not from 1 to the limit of serve (14)"
    assert [token for n in news if n.request == 4 for token in n.tokens] == alone("prompt_lookup", 1)


def test_bad_settings():
    with pytest.raises(UsageError, match="slots and longest_prompt must be at least 1"):
        serve(tiny_llama(), None, [], **LIMITS | {"slots": 0})
    with pytest.raises(UsageError, match=r"must be a specjax\.Target, not Model; load one with specjax\.load"):
        serve(tiny_llama().model, None, [], **LIMITS)
    with pytest.raises(UsageError, match="more than the capacity"):
        serve(tiny_llama(), None, [], **LIMITS, capacity=20)
    with pytest.raises(UsageError, match='slots=3 cannot be split over the 2 devices of "data"; give a multiple'):
        serve(specjax.shard(tiny_llama(), specjax.mesh(data=2)), None, [], **LIMITS | {"slots": 3})
    assert list(serve(tiny_llama(), None, [], **LIMITS)) == []


def half_foreseen():
    """A target that goes round nine tokens, or draws from 40 others alike."""
    rows = np.full((49, 49), 1e-9, np.float32)
    rows[np.arange(9), (np.arange(9) + 1) % 9] = 1.0
    rows[9:, 9:] = 1 / 40
    return markov(rows)


def test_auto_does_not_neglect_a_long_request_for_the_newest_ones():
    """A predictable one of 200 tokens beside short ones that cannot, of which the newest is always the slowest."""
    drafter, key = drafters.auto(49, widths=(1, 8), costs=(1.0, 2.0)), jax.random.key(0)
    limits = {"slots": 4, "longest_prompt": 4, "max_new_tokens": 200, "temperature": 1.0}
    short_requests = [Request([9 + n % 40], jax.random.key(n), 8) for n in range(1, 60)]
    steps = lambda requests: sum(n.request == 0 for n in serve(half_foreseen(), drafter, requests, **limits))
    alone, beside = (steps([Request([0], key), *some]) for some in ([], short_requests))
    assert alone < 45 and beside < 1.3 * alone


def test_auto_does_not_neglect_short_requests_for_a_long_one():
    """Predictable ones of 16 tokens beside one of 200 that cannot be foreseen."""
    drafter = drafters.auto(49, widths=(1, 8), costs=(1.0, 2.0))
    limits = {"slots": 4, "longest_prompt": 4, "max_new_tokens": 200, "temperature": 1.0}
    requests = [Request([9], jax.random.key(0)), *(Request([n % 9], jax.random.key(n), 16) for n in range(1, 31))]
    assert sum(n.request > 0 for n in serve(half_foreseen(), drafter, requests, **limits)) < 200


def accepted_of(target, drafter, requests, **options):
    """Drafted tokens of each request that were accepted, and the last news."""
    accepted, news = [0] * len(requests), None
    for news in serve(target, drafter, requests, **options):
        accepted[news.request] += news.accepted
    return accepted, news


def cycle(n):
    """A target that goes round n tokens."""
    return markov(np.eye(n, dtype=np.float32)[(np.arange(n) + 1) % n] + 1e-9)


RECYCLING = functools.partial(drafters.token_recycling, 30, num_nodes=7)
REMEMBERING = {
    "token_recycling": RECYCLING,
    "auto": lambda: drafters.auto(30, costs=(1.0, 1.01, 1.02, 1.03)),
    "stand": lambda: drafters.stand(30, num_nodes=8, buckets=64),
    "aded": lambda: drafters.aded(num_nodes=7, buckets=64),
    "choice": lambda: drafters.choice(RECYCLING(), depths=(3,), costs=(1.0, 1.01)),
    "suffix": lambda: drafters.suffix(4, fallback=RECYCLING()),
}


@pytest.mark.parametrize("name", REMEMBERING)
def test_what_one_request_taught_serves_the_next_one(name):
    """A request accepts as much as `decode` does with the drafter of an earlier one; and nothing is compiled for it."""
    target, drafter, limits = cycle(30), REMEMBERING[name](), LIMITS | {"slots": 1}
    new = Request([0, 1, 2], jax.random.key(0), 14)
    same = lambda drafter: decode(target, drafter, [new.prompt], key=new.key[None], max_new_tokens=14)
    cold = same(drafter)
    warm = same(cold.drafter)
    accepted_of(target, drafter, [new] * 2, **limits)
    sizes = lambda: [f._cache_size() for f in (admission.begin, module._empty, module._end, module.step)]
    num_programs = sizes()
    accepted, last = accepted_of(target, drafter, [new] * 4, **limits)
    assert sizes() == num_programs
    assert accepted[:2] == [int(one.stats.accepted[0]) for one in (cold, warm)] and accepted[0] + 5 < accepted[1]
    again, _ = accepted_of(target, last.drafter(), [new], **limits)
    assert again[0] >= accepted[1]


def test_what_is_taught_in_one_slot_is_known_in_the_others():
    target, news = cycle(30), Request([0], jax.random.key(0), 14)
    accepted, _ = accepted_of(target, RECYCLING(), [news] * 2 + [Request([14], news.key, 14)] + [news] * 9, **LIMITS)
    assert min(accepted[4:]) >= 8


CONTROLLERS = {
    "fixed": lambda: controllers.fixed(2),
    "additive": lambda: controllers.additive(2),
    "multiplicative": lambda: controllers.multiplicative(2),
    "bass": lambda: controllers.bass(2),
    "by_batch": controllers.by_batch,
    "goodput": lambda: controllers.goodput(costs=(1.0, 1.01, 1.02, 1.03, 1.05, 1.07)),
    "spec_kv": lambda: controllers.spec_kv(Weights(*map(np.zeros, ((6, 16), 16, 16, ())))),
}


@pytest.mark.parametrize("name", those(("bass", "goodput"), CONTROLLERS))
def test_texts_under_every_controller(name):
    options = {"controller": CONTROLLERS[name](), "temperature": 1.0, "sampling": "coupled"}
    close = drafters.two_model(tiny_llama(), 3, keep_logits=True)
    texts, _ = served(close, [0, 1, 2, 3, 4], **options)
    plain = {"temperature": 1.0, "sampling": "coupled"}
    assert texts == {i: alone("autoregressive", i, **plain) for i in range(5)}


def admitted(controller, slots, change=lambda control: control):
    """The limits before and after a request comes into slot 1 of a batch whose controller has seen something."""
    prompts = np.zeros((slots, 4), np.int32), np.ones(slots, np.int32)
    drafter, key = DRAFTERS["prompt_lookup"](), jax.random.key(0)
    job = prepare(tiny_llama(), drafter, prompts, Settings(controller=controller), key=key, max_new_tokens=4)
    parts = dataclasses.replace(job.parts, eos=np.zeros((slots, 0), np.int32))
    _, state = module._empty(job)
    state = state._replace(control=change(state.control))
    old_limits = np.asarray(controller.limit(state.control))
    slot, size = min(1, slots - 1), state.tokens.shape[1]
    packed = admission.pack_request(size, slot, Request([3, 4], key), jax.random.split(key, 1), 4, [])
    new_state = admission.enter(parts, state, admission.begin(parts, packed), packed.slot)
    return old_limits.tolist(), np.asarray(controller.limit(new_state.control)).tolist()


def test_controllers_know_how_many_slots_there_are():
    assert admitted(controllers.by_batch(), 64) == ([1] * 64, [1] * 64)
    assert admitted(controllers.by_batch(), 1) == ([7], [7])


@pytest.mark.parametrize("slots", [1, 3])
def test_a_length_that_rows_share_stays_and_one_of_their_own_begins_anew(slots):
    raised = lambda control: jax.tree.map(lambda x: x if x.dtype == bool else x + 3, control)
    slot = min(1, slots - 1)
    assert admitted(controllers.bass(4), slots, raised) == ([7] * slots, [7] * slots)
    limits = [2 if n == slot else 5 for n in range(slots)]
    assert admitted(controllers.additive(2), slots, raised) == ([5] * slots, limits)
