"""Answers are what plain decoding writes, and a folder of them is read by any later run."""

import functools

import numpy as np
import pytest
import toy

import specjax
from specjax.errors import UsageError
from specjax.training.answers import Answers, answer

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


@functools.cache
def greedy() -> tuple:
    return tuple(answer(toy.tiny_llama(), PROMPTS, eos=(), max_new_tokens=6, slots=2))


def test_answers_are_those_of_decode():
    target = toy.tiny_llama()
    told = {one.prompt: one for one in greedy()}
    alone = specjax.decode(target, None, PROMPTS, key=0, max_new_tokens=6).to_lists()
    assert [list(told[i].text.tokens) for i in range(4)] == [
        [*prompt, *text] for prompt, text in zip(PROMPTS, alone, strict=True)
    ]
    assert {one.finish_reason for one in told.values()} == {"length"}


def test_a_folder_goes_on_after_a_line_that_was_cut(tmp_path):
    about = {"target": "tiny", "temperature": 0.0}
    kept = Answers(tmp_path, about)
    told = greedy()
    for one in told[:3]:
        kept.add(one)
    with (tmp_path / "answers-00000.jsonl").open("a") as file:
        file.write('{"prompt":[10],"answ')
    again = Answers(tmp_path, about)
    assert [again.of(one.text.tokens[: one.text.answer]) for one in told] == [*(one.text for one in told[:3]), None]
    again.add(told[3])
    assert Answers(tmp_path, about).of(PROMPTS[told[3].prompt]) == told[3].text
    with pytest.raises(UsageError, match=r"temperature 0\.0, not 0\.7"):
        Answers(tmp_path, about | {"temperature": 0.7})


def test_a_sampled_answer_depends_on_its_own_prompt_alone():
    target = toy.tiny_llama()
    settings = {"eos": (), "max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    some = {one.prompt: one.text for one in answer(target, PROMPTS, slots=2, **settings)}
    others = {one.prompt: one.text for one in answer(target, PROMPTS[:3], slots=2, **settings)}
    assert others == {i: some[i] for i in others}
    assert len(np.unique([text.tokens[-1] for text in some.values()])) > 1
