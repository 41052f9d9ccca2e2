"""Texts of several writers, against plain decoding by the model that should have written them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib
from tiers import exhaustive
from toy import tiny_llama, tiny_llama_alike
from toy_models import recurrent

from specjax import UsageError, decode, drafters
from specjax.collaborate import multi_writer as texts
from specjax.collaborate import segments
from specjax.engine.prepare import Settings

INSIDE = {
    "autoregressive": lambda: None,
    "two_model": lambda: drafters.two_model(lib.alike(), 3),
    "prompt_lookup": lambda: drafters.prompt_lookup(3),
    "token_recycling": lambda: drafters.token_recycling(16, num_nodes=5),
    "stand": lambda: drafters.stand(16, num_nodes=4),
}


def alternating(job, limits, text=None):
    """Writers in turn, each as many tokens."""
    text = lib.begin(job) if text is None else text
    for turn, limit in enumerate(limits):
        text, _ = lib.turn(job.writers, text, turn % len(job.writers), limit=limit)
    return text


@pytest.mark.exhaustive
def test_two_writers_with_keys_and_values():
    """Two writers that are one transformer, one of them with a transformer that drafts, write its text."""
    job = lib.job_of([tiny_llama(), tiny_llama()], (drafters.two_model(tiny_llama_alike(), 3), None))
    assert lib.new_tokens(alternating(job, (1, 2, 3, 1, 4, 9))) == lib.plain(tiny_llama())


@pytest.mark.parametrize("name, temperature", [
    ("autoregressive", 0.8), ("two_model", 0.0), exhaustive("prompt_lookup", 0.8), exhaustive("token_recycling", 0.0),
    exhaustive("stand", 0.0),
])  # fmt: skip
def test_two_writers_of_one_model_write_its_text(name, temperature):
    """Both writers read what the other wrote, cache and drafter included; they share a key, since a draw belongs to a
    position."""
    settings = Settings(temperature=temperature, sampling="coupled" if temperature else "speculative")
    job = lib.job_of([lib.history(), lib.history()], (INSIDE[name](), INSIDE[name]()), settings=settings)
    text = lib.begin(job)
    limits = (1, 2, 3, 1, 4, np.iinfo(np.int32).max)
    text = alternating(job, limits, text._replace(keys=text.keys[:, [0, 0]]))
    assert lib.new_tokens(text) == lib.plain(lib.history(), temperature=temperature)
    for row, start in zip(np.asarray(text.author), np.asarray(text.prompt), strict=True):
        assert row[start : start + 12].tolist() == [0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1]
        assert (row[:start] == texts.PROMPT).all()


def test_the_other_model_goes_on_from_what_the_first_wrote():
    """Against decoding of a longer prompt."""
    first, second = lib.history(), lib.history(1)
    text = alternating(lib.job_of([first, second]), (3, 4, 5))
    prompts, wanted = lib.PROMPTS, [[], [], []]
    for model, count in ((first, 3), (second, 4), (first, 5)):
        new = lib.plain(model, prompts=prompts, max_new_tokens=count)
        prompts = [[*a, *b] for a, b in zip(prompts, new, strict=True)]
        wanted = [[*a, *b] for a, b in zip(wanted, new, strict=True)]
    assert lib.new_tokens(text) == wanted
    assert text.passes.tolist() == [[9, 5]] * 3  # 8 tokens by the first, and a pass to read 4; 4, and a pass to read 3
    assert text.read.tolist() == [[8 + 4, 4 + 3]] * 3


@pytest.mark.parametrize("name", ["two_model", exhaustive("token_recycling")])
def test_a_step_ends_where_it_would_token_by_token(name):
    """Drafts reach beyond the end of a step, and are taken back; what is written then is as if they had never been."""
    plain_rows = lib.plain(lib.history(), max_new_tokens=24)
    common = sorted(
        {token for row in plain_rows for token in row}, key=lambda t: -sum(row.count(t) for row in plain_rows)
    )[:2]
    segmenter = segments.after_any(common, 16)
    job = lib.job_of([lib.history()], (INSIDE[name](),), max_new_tokens=24)
    text, ends = lib.begin(job), [[] for _ in plain_rows]
    while np.asarray(text.unfinished).any():
        old_length = np.asarray(text.length)
        text, written = lib.turn(job.writers, text, 0, segmenter=segmenter)
        for row, (start, end) in enumerate(zip(old_length, np.asarray(text.length), strict=True)):
            if end > start:
                ends[row].append((int(end - text.prompt[row]), bool(written.complete[row])))
    assert lib.new_tokens(text) == plain_rows
    for row, tokens in enumerate(plain_rows):
        marks = [(n + 1, True) for n, token in enumerate(tokens) if token in common]
        assert ends[row] == marks + [(24, False)] * (not marks or marks[-1][0] < 24)
    assert sum(map(len, ends)) > 6


def test_an_eos_ends_a_row_and_nothing_follows():
    plain_rows = lib.plain(lib.history(), max_new_tokens=12)
    eos = plain_rows[0][4]
    wanted = lib.plain(lib.history(), eos=eos)
    text = alternating(lib.job_of([lib.history()], (INSIDE["two_model"](),), settings=Settings(eos=eos)), (3, 3, 9))
    assert lib.new_tokens(text) == wanted
    assert text.ended.tolist() == [row[-1] == eos for row in wanted] and bool(text.ended[0])


def test_rows_that_are_not_active_stay_as_they_are():
    job = lib.job_of([lib.history(), lib.history(1)], (INSIDE["two_model"](), None))
    text = lib.begin(job)
    for who, rows in ((0, [1, 0, 1]), (1, [0, 1, 0]), (0, [1, 1, 0])):
        text, _ = lib.turn(job.writers, text, who, limit=4, active=rows)
    new = lib.new_tokens(text)
    alone = lib.plain(lib.history(), max_new_tokens=8)
    assert new[0] == alone[0] and new[2] == alone[2][:4]
    other = lib.plain(lib.history(1), max_new_tokens=4)[1]
    assert new[1] == other + lib.plain(lib.history(), prompts=[[*lib.PROMPTS[1], *other]] * 3, max_new_tokens=4)[0]


@pytest.mark.parametrize("name", ["two_model", exhaustive("token_recycling")])
def test_what_was_taken_back_leaves_nothing_behind(name):
    """Another writer's tokens take the place of a writer's own, which then goes on."""
    job = lib.job_of([lib.history(), lib.history(1)], (INSIDE[name](), None))
    counts = [2, 0, 5]
    text, _ = lib.turn(job.writers, lib.begin(job), 0, limit=6)
    text = lib.rewind(job.writers, text, text.prompt + np.array(counts))
    text = alternating(job, (0, 4, 3), text)
    first = lib.plain(lib.history(), max_new_tokens=6)
    prompts = [[*prompt, *row[:n]] for prompt, row, n in zip(lib.PROMPTS, first, counts, strict=True)]
    second = lib.plain(lib.history(1), prompts=prompts, max_new_tokens=4)
    third = lib.plain(lib.history(), prompts=[[*a, *b] for a, b in zip(prompts, second, strict=True)], max_new_tokens=3)
    for row, n in enumerate(counts):
        assert lib.new_tokens(text)[row] == ([*first[row][:n], *second[row], *third[row]])[:12]


def test_the_prompt_is_never_taken_back():
    job = lib.job_of([lib.history()])
    text = lib.rewind(job.writers, lib.begin(job), np.zeros(3, np.int32))
    assert text.length.tolist() == job.lengths.tolist()


def test_forks_write_what_samples_of_a_prompt_write():
    settings = Settings(temperature=1.0)
    job = lib.job_of([lib.history()], (INSIDE["prompt_lookup"](),), settings=settings)

    forked = jax.jit(lambda job: (texts.forked(job.writers, 3), texts.fork(job.writers, job.begin(), 3)))(job)
    text, _ = lib.turn(*forked, 0)
    wanted = decode(
        lib.history(), INSIDE["prompt_lookup"](), lib.PROMPTS, key=lib.KEYS, max_new_tokens=12, temperature=1.0,
        samples_per_prompt=3,
    ).to_lists()  # fmt: skip
    assert lib.new_tokens(text) == wanted
    assert len({tuple(row) for row in wanted}) > 6


def test_selected_rows_go_on_as_themselves():
    job = lib.job_of([lib.history()], (INSIDE["two_model"](),))

    text, _ = lib.turn(job.writers, lib.begin(job), 0, limit=5)
    text = jax.jit(texts.select)(job.writers, text, np.array([2, 0, 0]))
    text, _ = lib.turn(job.writers, text, 0)
    plain_rows = lib.plain(lib.history())
    assert lib.new_tokens(text) == [plain_rows[2], plain_rows[0], plain_rows[0]]


def test_scores_are_those_of_a_whole_pass():
    model = lib.history(1)
    job = lib.job_of([lib.history(), model], spare=5)
    appended = jnp.array([[7, 8, 9, 10, 11], [1, 2, 3, 0, 0], [5, 0, 0, 0, 0]])
    count = jnp.array([5, 3, 0])

    @jax.jit
    def judge(writers, text):
        text, scores = texts.score(writers, text, 1, appended, count)
        return *texts.look(writers, text, 1), scores

    text, _ = lib.turn(job.writers, lib.begin(job), 0, limit=4)
    judged, logits, hidden, scores = judge(job.writers, text)
    text, _ = lib.turn(job.writers, judged, 1)
    assert judged.passes[:, 1].tolist() == [3, 3, 3]  # what the other wrote, the score, the look
    for row, n in enumerate(count.tolist()):
        written = lib.new_tokens(judged)[row]
        tokens = [*lib.PROMPTS[row], *written, *appended[row, :n].tolist()]
        output = _whole(model, tokens)
        log_p = np.asarray(jax.nn.log_softmax(output.logits[0]))
        place = np.arange(len(tokens) - n - 1, len(tokens) - 1)
        np.testing.assert_allclose(scores.logprobs[row, :n], log_p[place, tokens[len(tokens) - n :]], atol=2e-5)
        np.testing.assert_allclose(scores.entropies[row, :n], -(np.exp(log_p) * log_p).sum(1)[place], atol=2e-5)
        np.testing.assert_allclose(scores.logits[row], output.logits[0, -1], atol=2e-5)
        np.testing.assert_allclose(scores.hidden[row], output.hidden[0, -1], atol=2e-5)
        at = len(tokens) - n - 1
        np.testing.assert_allclose(logits[row], output.logits[0, at], atol=2e-5)
        np.testing.assert_allclose(hidden[row], output.hidden[0, at], atol=2e-5)
        assert not scores.logprobs[row, n:].any()
        # and the score left nothing behind
        next_tokens = lib.plain(model, prompts=[[*lib.PROMPTS[row], *written]] * 3, max_new_tokens=8)[0]
        assert lib.new_tokens(text)[row] == [*written, *next_tokens]


def _whole(target, tokens):
    n = len(tokens)
    mask = jnp.tril(jnp.ones((1, n, n), bool))
    cache = target.model.init_cache(target.params, None, 1, 64)
    ids = jnp.array([tokens])
    return target.model.forward(target.params, ids, cache, positions=jnp.arange(n)[None], mask=mask)[0]


def test_a_second_text_compiles_nothing():
    alternating(lib.job_of([lib.history(), lib.history(1)]), (3, 4, 5))
    count = lib._turn._cache_size()
    other = lib.job_of([lib.history(), lib.history(1)], prompts=[[9], [8, 7, 6], [5, 5]], key=jax.random.key(9))
    alternating(other, (2, 9, 1))
    assert lib._turn._cache_size() == count


def test_long_parts_of_others_are_read_in_chunks():
    """More than one chunk behind, in one row only."""
    first, second = lib.history(), lib.history(1)
    job = lib.job_of([first, second], max_new_tokens=48)

    text, _ = lib.turn(job.writers, lib.begin(job), 0, limit=[40, 3, 17])
    text, _ = lib.turn(job.writers, text, 1, limit=5)
    written = lib.plain(first, max_new_tokens=40)
    for row, n in enumerate((40, 3, 17)):
        prompt = [*lib.PROMPTS[row], *written[row][:n]]
        assert lib.new_tokens(text)[row][n:] == lib.plain(second, prompts=[prompt] * 3, max_new_tokens=5)[0]
    assert text.passes[:, 1].tolist() == [3 + 5, 1 + 5, 2 + 5]


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="vocabularies of 16, 8 tokens"):
        lib.job_of([lib.history(), lib.history(vocab=8)], prompts=[[1]], key=0)
    with pytest.raises(UsageError, match="recurrent cannot rewind its cache"):
        lib.job_of([recurrent()], prompts=[[1]], key=0)
    assert lib.job_of([recurrent()], prompts=[[1]], key=0, rewinds=False)


def test_a_model_that_cannot_rewind_writes_and_looks():
    target = recurrent()
    job = lib.job_of([target], prompts=[[1, 2], [3]], key=0, max_new_tokens=6, rewinds=False)

    @jax.jit
    def look(writers, text):
        text, logits, _ = texts.look(writers, text, 0)
        return texts.append_one(writers, text, jnp.argmax(logits, -1), 0, text.unfinished)

    text = lib.begin(job)
    for _ in range(6):
        text = look(job.writers, text)
    wanted = lib.plain(target, prompts=[[1, 2], [3]], key=0, max_new_tokens=6)
    assert lib.new_tokens(text) == lib.new_tokens(alternating(job, (2, 4))) == wanted


def test_a_model_of_nan_ends_its_rows():
    """The engine writes no token for such a row, so a loop that waits for one would never end."""
    broken = jax.tree.map(lambda x: x * jnp.nan, tiny_llama())
    job = lib.job_of([broken], (None,))
    text, _ = lib.turn(job.writers, lib.begin(job), 0, limit=3)
    assert not text.finite.any() and not text.unfinished.any() and not text.written.any()
