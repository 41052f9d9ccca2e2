"""The judge's prompt, against a rendered conversation."""

import pytest

from specjax import UsageError
from specjax.collaborate.judging import ANSWER, DIGITS, QUESTION, judge_prompt

OPEN, CLOSE = 1, 2
ROLES = {"system": 3, "user": 4, "assistant": 5}


class Bytes:
    """Byte b is id b + 10. A blank and a digit are one token, 300 to 309, if `joins`."""

    chat_template = "a template"

    def __init__(self, joins=False, merges=False):
        self.joins, self.merges = joins, merges

    def encode(self, text, special=True):
        ids = [byte + 10 for byte in text.encode()]
        if self.joins:
            for digit in range(10):
                pair = [32 + 10, 48 + digit + 10]
                for place in reversed(range(len(ids) - 1)):
                    if ids[place : place + 2] == pair:
                        ids[place : place + 2] = [300 + digit]
        return ids if not self.merges else [5]

    def chat(self, messages):
        system = [{"role": "system", "content": "Be brief."}]
        turns = [[OPEN, ROLES[m["role"]], *self.encode(m["content"]), CLOSE] for m in [*system, *messages]]
        return [*(i for turn in turns for i in turn), OPEN, ROLES["assistant"]]


@pytest.mark.parametrize("joins", [False, True])
def test_it_is_a_new_turn_of_the_user_and_the_beginning_of_an_answer(joins):
    tokenizer = Bytes(joins)
    judge = judge_prompt(tokenizer)
    step = "2 + 2 = 4.\n\n"
    history = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": step}]
    opening = [*tokenizer.chat(history[:1]), *tokenizer.encode(step)]
    for digit in range(10):
        wanted = tokenizer.chat([*history, {"role": "user", "content": QUESTION}])
        wanted += tokenizer.encode(f"{ANSWER}{digit}")
        assert [*opening, *judge.judging, judge.digits[digit]] == wanted
    assert judge.digits == ([300 + i for i in range(10)] if joins else [58 + i for i in range(10)])


def test_without_a_template_it_is_two_lines():
    tokenizer = Bytes()
    judge = judge_prompt(tokenizer, "Right?", "Rating:", raw=True)
    assert judge.judging == tokenizer.encode("\nRight?\nRating:") and len(judge.digits) == len(DIGITS)
    tokenizer.chat_template = None
    assert judge_prompt(tokenizer, "Right?", "Rating:") == judge


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match="no token for each digit after"):
        judge_prompt(Bytes(merges=True), "Right?", "Rating:", raw=True)
    forgetful = Bytes()
    forgetful.chat = lambda messages: [OPEN, CLOSE]
    with pytest.raises(UsageError, match="leaves earlier answers out"):
        judge_prompt(forgetful)
