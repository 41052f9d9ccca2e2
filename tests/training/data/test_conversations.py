"""Conversations as training texts: which tokens are trained, and after which tokens."""

import numpy as np
import pytest

from specjax.errors import UsageError
from specjax.training.data.conversations import Turn, given_turns, join_turns, question_turns
from specjax.training.data.packing import TrainingText, find_round_starts, number_tokens, pack

END, USER, BOT = 1, 2, 3


class Template:
    """A template that writes a role, the letters and an end; it may leave reasoning out of earlier answers."""

    eos = (END,)

    def __init__(self, drops: bool = False):
        self.drops = drops

    def encode(self, text, special=True):
        return [10 + ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(chr(i - 10) for i in ids if i >= 10)

    def chat(self, messages):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids = []
        for message in messages:
            content = message["content"]
            if self.drops and message["role"] == "assistant":
                content = content.split("</think>")[-1]
            ids += [USER if message["role"] == "user" else BOT, *self.encode(content), END]
        return [*ids, BOT]


def conversation(*contents, **last):
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def trained(text: TrainingText, template: Template) -> list[str]:
    """Return the trained stretches, with "." for the end of an answer."""
    spell = lambda ids: "".join("." if i == END else template.decode([i]) for i in ids)
    return [spell(text.tokens[begin:end]) for begin, end in text.responses]


def test_given_answers_of_all_turns_are_trained_in_one_text():
    template, messages = Template(), conversation("q", "ab", "r", "c")
    (text,) = join_turns(given_turns(messages, template))
    assert trained(text, template) == ["ab.", "c."] and text.response_length == 5
    assert list(text.tokens) == template.chat(messages)[:-1]
    (packed,) = pack([text], 1, 32)
    assert [chr(t - 10) if t >= 10 else "." for t in np.asarray(packed.tokens[packed.loss_mask])] == list("ab.c.")
    assert find_round_starts(packed).sum() == 5


def test_an_answer_of_weight_zero_is_not_trained():
    messages = conversation("q", "ab", "r", "c")
    messages[1] |= {"weight": 0}
    (text,) = join_turns(given_turns(messages, Template()))
    assert trained(text, Template()) == ["c."]


def test_a_template_that_rewrites_earlier_turns_gives_a_text_per_turn():
    template = Template(drops=True)
    first, second = join_turns(given_turns(conversation("q", "x</think>a", "r", "b"), template))
    assert trained(first, template) == ["x</think>a."], "the answer as the model writes it"
    assert list(second.tokens) == [*template.chat(conversation("q", "a", "r")), 10 + ord("b"), END]


def test_questions_are_asked_again_without_the_given_answers():
    messages = [{"role": "system", "content": "s"}, *conversation("q", "ab", "r", "c", "t")]
    turns = [[message["content"] for message in turn] for turn in question_turns(messages)]
    assert turns == [["s", "q"], ["r"], ["t"]]
    greeting = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "hello"}, *conversation("q")]
    assert question_turns(greeting) == [[greeting[0], greeting[2]]], "the system prompt stays before the first question"
    with pytest.raises(UsageError, match="no answer to train on"):
        given_turns(conversation("q"), Template())


def test_texts_of_several_turns_are_cut_and_numbered_like_others():
    (text,) = join_turns([Turn((1, 2), (3, 4)), Turn((1, 2, 3, 4, 5), (6, 7))])
    assert text == TrainingText((1, 2, 3, 4, 5, 6, 7), 2, ((4, 5),))
    assert text.cut(6).response_tokens == [3, 4, 6] and text.cut(4) == TrainingText((1, 2, 3, 4), 2)
    assert text.cut(1).response_length == 0
    assert number_tokens([text, text])[1].tokens[0] == 8
