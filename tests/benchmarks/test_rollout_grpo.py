"""The benchmark of rollouts: its problems, and a short run of a tiny policy."""

import argparse
import pathlib

import pytest
from scripts import module_at
from toy import tiny_llama

FILE = pathlib.Path(__file__).parents[2] / "benchmarks" / "rollout_grpo.py"


class Numbers:
    """A tokenizer whose texts have numbers below 64."""

    eos = ()

    def chat(self, text):
        return [1 + ord(letter) % 60 for letter in text[:6]]

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def bench():
    return module_at(FILE)


def test_answers_of_the_problems(bench):
    first, second, third = bench.problems(3)
    numbers = [[int(x) for x in bench.re.findall(r"\d+", problem.text)] for problem in (first, second, third)]
    results = [a + b - c for a, b, c in numbers[:1]] + [a * b - c for a, b, c in numbers[1:2]] + [sum(numbers[2])]
    assert [first.answer, second.answer, third.answer] == results
    assert (
        bench.reward_of("so she has 12 apples", 12) == 1
        and 0 < bench.reward_of("112", 12) < 0.01 < bench.reward_of("11", 12) < 1
    )


def test_both_sides_draw_the_same_texts(bench):
    options = argparse.Namespace(
        prompts=2, group=2, epochs=2, max_new_tokens=8, temperature=0.5, layers=1, learning_rate=1e-3, drafter="auto",
        seed=0, estimated_costs=True, rescore=True, refresh=0,
    )  # fmt: skip
    report = bench.run(tiny_llama(), Numbers(), options)
    assert report["gap"] == 0 and report["trainer_gap"] < 5e-5 and len(report["steps"]) == 4
    assert all(row["tokens_per_pass"] >= 1 for row in report["epochs"])
    pytest.importorskip("matplotlib")
    assert bench.draw(report).startswith(b"\x89PNG")
