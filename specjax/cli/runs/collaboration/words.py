"""Arguments of collaborations that the loaded tokenizer and models make from words: steps, judges, cues, drafters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specjax.catalog import METHODS, Method
from specjax.catalog.options import read_call
from specjax.cli.options.common import parse_flag
from specjax.cli.runs.session import Session, check_vocabularies, load_beside
from specjax.collaborate import RewardModel, after_sentences, after_strings, count_strings, judge_prompt, load_reward
from specjax.drafters.making import make_drafter, make_inner_drafter
from specjax.types import Drafter, Target

STEP_ENDS = dict.fromkeys(("spec_reason", "speculative_thinking", "arbitrage", "a_star"), ("\n\n",)) | {
    "cntp": tuple(".,;:?!\n)]}")
}
"""The texts that end a step, or a trial of cntp, without --set steps. Those of foreal are the ends of sentences."""
ANSWER_MARK = "\n---\n"
"""The line between the question and the answer in the file of --set judging."""
CUES = {
    "positive": ("yeah", "yes", "final answer", "confident"),
    "negative": ("wait", "alternatively", "hold on", "another"),
    "verify": ("verify", "think again", "recap", "check"),
}
CHECK = "Let me check whether there are some wrong steps:"


def word_arguments(
    name: str, tokenizer: Any, vocab_size: int, options: Mapping[str, Any] = MappingProxyType({}), *, raw: bool = False
) -> dict[str, Any]:
    """Return the arguments of a method that are words, as tokens and automata.

    options: values of --set for the method's `words`. raw: the prompts have no chat template.

    Raises: UsageError that names the flag of words that the tokenizer or its template cannot write.
    """
    arguments: dict[str, Any] = {}
    steps = options.get("steps") or STEP_ENDS.get(name)
    argument = "punctuation" if name == "cntp" else "segmenter"
    if steps is not None:
        arguments[argument] = after_strings(steps, tokenizer, vocab_size)
    elif name == "foreal":
        arguments[argument] = after_sentences(tokenizer, vocab_size)
    if name == "spec_reason":
        arguments |= judge_arguments(tokenizer, options.get("judging"), raw)
        if options.get("answer"):
            arguments["answer"] = count_strings(options["answer"], tokenizer, vocab_size)
    if name == "speculative_thinking":
        arguments |= {side: count_strings(cues, tokenizer, vocab_size) for side, cues in CUES.items()}
        arguments["check"] = list(tokenizer.encode(CHECK, special=False))
    return arguments


def judge_arguments(tokenizer: Any, judging: str | None, raw: bool) -> dict[str, Any]:
    """Return the judge's prompt and its digits. judging: the text of the file, or None."""
    if judging is None:
        return judge_prompt(tokenizer, raw=raw)._asdict()
    question, mark, answer = judging.partition(ANSWER_MARK)
    words = {"question": question.strip()} | ({"answer": answer.rstrip("\n")} if mark else {})
    return parse_flag("--set judging", lambda _: judge_prompt(tokenizer, raw=raw, **words)._asdict(), judging)


def load_rewards(options: Mapping[str, Any], session: Session) -> dict[str, RewardModel]:
    """Load the reward models of --set reward and --set router. Raises: UsageError that names the flag."""
    rewards = {}
    for name in ("reward", "router"):
        source = options.get(name)
        if source is None:
            continue
        more = {key: options[f"{name}_{key}"] for key in ("head", "link", "suffix") if f"{name}_{key}" in options}
        load = lambda source: load_reward(source, dtype=session.dtype, **more)  # noqa: B023, called at once
        rewards[name], tokenizer = parse_flag(f"--set {name}", load, source)
        check_vocabularies(session.tokenizer, tokenizer, f"--set {name}")
    return rewards


def load_writers(row: Method, options: Mapping[str, Any], session: Session) -> dict[str, Target]:
    """Load the other models of --set that write, by the name of their option. Raises: UsageError."""
    names = [option.name for option in row.words if option.type == "model" and options.get(option.name) is not None]
    return {name: load_beside(session, options[name], f"--set {name}") for name in names}


def make_writing_drafter(spec: str | None, session: Session) -> Drafter | None:
    """Return the drafter of --set drafter for the target's own tokens, or None. Raises: UsageError."""
    if spec is None:
        return None
    if spec.partition(":")[0] != "two_model":
        return make_inner_drafter(spec, session.target)
    options = read_call(spec, METHODS["two_model"].options)
    return make_drafter("two_model", session.target, session.draft, **options)
