"""Answers are what plain decoding writes, and a folder of them is read by any later run."""

import functools

import pytest
import toy

import specjax
from specjax.errors import UsageError
from specjax.training.data.target_responses import ResponseStore, generate_responses

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


@functools.cache
def greedy() -> tuple:
    return tuple(generate_responses(toy.tiny_llama(), PROMPTS, eos=(), max_new_tokens=6, slots=2))


def test_answers_are_those_of_decode():
    target = toy.tiny_llama()
    alone = specjax.decode(target, None, PROMPTS, key=0, max_new_tokens=6).to_lists()
    assert {one.text.tokens for one in greedy()} == {
        (*prompt, *text) for prompt, text in zip(PROMPTS, alone, strict=True)
    }
    assert {one.finish_reason for one in greedy()} == {"length"}


def test_answers_over_a_mesh_are_those_of_one_device():
    """A mesh that splits rows gives the same answers: five prompts in batches of four, sampled, one of them twice."""
    prompts, numbers = [*PROMPTS, [10]], [0, 0, 0, 0, 1]
    options = {"eos": (3,), "max_new_tokens": 6, "temperature": 1.0, "slots": 4, "seed": 5, "numbers": numbers}
    spread = specjax.shard(toy.tiny_llama(), specjax.mesh(2, 2))
    many = list(generate_responses(spread, prompts, **options))
    assert [one.text.tokens[: one.text.prompt_length] for one in many] == [tuple(prompt) for prompt in prompts]
    assert set(many) == set(generate_responses(toy.tiny_llama(), prompts, **options))


def test_a_folder_goes_on_after_a_line_that_was_cut(tmp_path):
    about = {"target": "tiny", "temperature": 0.0}
    store = ResponseStore(tmp_path, about)
    responses = greedy()
    for one in responses[:3]:
        store.add(one)
    with (tmp_path / "answers-00000.jsonl").open("a") as file:
        file.write('{"prompt":[10],"answ')
    again = ResponseStore(tmp_path, about)
    prompts = [one.text.tokens[: one.text.prompt_length] for one in responses]
    assert [again.get(prompt) for prompt in prompts] == [*responses[:3], None]
    again.add(responses[3])
    assert ResponseStore(tmp_path, about).get(prompts[3]) == responses[3]
    with pytest.raises(UsageError, match=r"temperature 0\.0, not 0\.7"):
        ResponseStore(tmp_path, about | {"temperature": 0.7})
    with pytest.raises(UsageError, match="holds responses of another model called tiny; give another folder"):
        ResponseStore(tmp_path, about | {"weights": "other"})


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("answers.json", "[1]", "is not a JSON object"),
        ("answers.json", "{", "cannot hold responses"),
        ("answers-00000.jsonl", '{"prompt": 5, "answer": [1], "finish": "eos"}', "line 1 is not a response"),
        (
            "answers-00000.jsonl",
            '\n{"prompt": [1], "answer": [64], "finish": "eos"}',
            "line 2 .*64 is not one of the 64 token ids",
        ),
        ("answers-00000.jsonl", '{"prompt": [1], "finish": "eos"}', "without 'answer'"),
        ("answers-00000.jsonl", "[[1], [2]]", "line 1 is not a response"),
        ("answers-00000.jsonl", b"\xff", "cannot hold responses"),
    ],
)
def test_what_is_not_of_answers_is_one_sentence(tmp_path, file, text, words):
    about = {"vocabulary": 64}
    ResponseStore(tmp_path, about)
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=words):
        ResponseStore(tmp_path, about)


def test_a_sampled_answer_depends_on_its_own_prompt_alone():
    """A run that goes on has the answers that it would have had, in whatever order it asks for them."""
    target = toy.tiny_llama()
    settings = {"eos": (), "max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    responses = set(generate_responses(target, PROMPTS, slots=2, **settings))
    assert set(generate_responses(target, PROMPTS[:0:-1], slots=2, **settings)) == {
        one for one in responses if list(one.text.tokens[: one.text.prompt_length]) != PROMPTS[0]
    }
    assert len({one.text.tokens[-1] for one in responses}) > 1
    several = {
        one.number: one.text
        for one in generate_responses(target, PROMPTS[:1] * 3, slots=2, **settings, numbers=range(3))
    }
    assert several[0] in {one.text for one in responses} and len(set(several.values())) == 3
