"""The judge's prompt of SpecReason: tokens between a step and its rating, from the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.errors import UsageError

QUESTION = (
    "Look at the last step of your reasoning alone. Is it true, and does it follow from the steps before it? Its style "
    "and its use for the answer do not count. Rate it with one digit, from 0 for a wrong step to 9 for a right one."
)
"""The judge's question, in our words. The authors ask for the same."""
ANSWER = "My rating of the quality of this step is: "
"""The beginning of the judge's answer, which the digit follows."""
DIGITS = "0123456789"


class JudgePrompt(NamedTuple):
    """The arguments `judging` and `digits` of `methods.spec_reason`."""

    judging: list[int]  # ids between the step and the rating
    digits: list[int]  # ids of 0 to 9


def judge_prompt(tokenizer: Any, question: str = QUESTION, answer: str = ANSWER, *, raw: bool = False) -> JudgePrompt:
    """Return the judge's prompt: a new turn of the user with the question, and the beginning of the answer.

    The chat template ends the turn of the step, and begins and ends the user's turn. Without a template, or with `raw`,
    question and answer are plain lines.

    Raises: UsageError for a template without earlier answers, or digits of several tokens.
    """
    spell = lambda text: list(tokenizer.encode(text, special=False))
    if raw or getattr(tokenizer, "chat_template", "") is None:
        return _with_digits([], f"\n{question}\n{answer}", spell)
    return _with_digits(_turn(tokenizer, question), answer, spell)


def _turn(tokenizer: Any, question: str) -> list[int]:
    """Return the ids from the end of an answer to the beginning of the next, with a question between them."""
    ask = {"role": "user", "content": question}
    first = {"role": "user", "content": "x"}
    # Two conversations that differ in the answer alone have these ids in common at their ends.
    chats = [tokenizer.chat([first, {"role": "assistant", "content": letter}, ask]) for letter in "ab"]
    common = _common([ids[::-1] for ids in chats])
    if not 0 < common < min(map(len, chats)):
        raise UsageError("the chat template leaves earlier answers out, so the judge sees no step; use plain prompts")
    return list(chats[0][-common:])


def _common(lists: Sequence[Sequence[int]]) -> int:
    """Return the number of ids with which all lists begin."""
    columns = zip(*lists, strict=False)
    differences = (number for number, column in enumerate(columns) if len(set(column)) > 1)
    return next(differences, min(map(len, lists)))


def _with_digits(turn: Sequence[int], answer: str, spell: Callable[[str], list[int]]) -> JudgePrompt:
    """Return the prompt with the answer's beginning. A token may join the last blank of the answer and a digit."""
    spelled = [spell(answer + digit) for digit in DIGITS]
    common = _common(spelled)
    digits = [ids[common] for ids in spelled if len(ids) == common + 1]
    if len(set(digits)) != len(DIGITS):
        raise UsageError(f'the tokenizer has no token for each digit after "{answer}"; end the answer in another way')
    return JudgePrompt([*turn, *spelled[0][:common]], digits)
