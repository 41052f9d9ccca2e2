"""Texts that several models or samples write together: `TextState` is the text, `methods` contains the methods."""

from specjax.collaborate import methods
from specjax.collaborate.judging import JudgePrompt, judge_prompt
from specjax.collaborate.multi_writer import (
    Scores,
    TextState,
    Written,
    append,
    begin,
    extend,
    fork,
    look,
    read,
    rewind,
    score,
    select,
)
from specjax.collaborate.phrases import PhraseCounter, count_strings, count_tokens
from specjax.collaborate.prepare import TextJob, prepare_texts
from specjax.collaborate.results import TextResult
from specjax.collaborate.rewards import Reward, RewardModel, load_reward, readers_of, reward_of
from specjax.collaborate.segments import Segmenter, after_any, after_sentences, after_strings, after_tokens

__all__ = [
    "JudgePrompt",
    "PhraseCounter",
    "Reward",
    "RewardModel",
    "Scores",
    "Segmenter",
    "TextJob",
    "TextResult",
    "TextState",
    "Written",
    "after_any",
    "after_sentences",
    "after_strings",
    "after_tokens",
    "append",
    "begin",
    "count_strings",
    "count_tokens",
    "extend",
    "fork",
    "judge_prompt",
    "load_reward",
    "look",
    "methods",
    "prepare_texts",
    "read",
    "readers_of",
    "reward_of",
    "rewind",
    "score",
    "select",
]
