"""The benchmark of texts of two models: its judges, its runs, which go on where they were killed, and its table."""

import pathlib

import pytest
from compiled import compiled_programs
from scripts import module_at
from texts import history

FILE = pathlib.Path(__file__).parents[2] / "benchmarks" / "collaboration_qwen.py"
SUCCESSOR = {
    "prompt": 'def f(x):\n    """x + 1."""\n',
    "test": "def check(f):\n    assert f(1) == 2\n",
    "entry_point": "f",
}
PROBLEMS = [({"answer": f"so\n#### {i}"}, [1, 2, 3][: 1 + i % 3]) for i in range(5)]


class Words:
    """Token i is a number, but for the last two: a line's end, and the end."""

    eos = (15,)
    chat_template = None

    def decode(self, ids):
        return "".join("\n" if token == 14 else f" {token}" for token in ids if token != 15)

    def encode(self, text, special=True):
        return [int(letter) if letter.isdigit() else 10 for letter in text]


@pytest.fixture(scope="module")
def bench():
    return module_at(FILE)


def run(bench, name, entry, problems=PROBLEMS, save=lambda: None):
    call = bench.make(name, "gsm8k", history(0), history(1), Words(), 3)
    bench.run_method(name, call, problems, entry, 2, 3, 40, Words(), "gsm8k", save)
    return entry


def empty(bench):
    return {key: [] for key in bench.EMPTY}


def test_the_last_number(bench):
    assert [bench.last_number(text) for text in ("3 + 4 = 7.", "$1,234.50", "of -5", "none")] == [7, 1234.5, -5, None]
    problem = {"answer": "9 * 2 = <<9*2=18>>18\n#### 1,018"}
    assert bench.is_right("gsm8k", problem, "she makes\n1018 dollars") and not bench.is_right("gsm8k", problem, "18")
    assert not bench.is_right("gsm8k", problem, "1018 or 1019") and not bench.is_right("gsm8k", problem, "")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here:\n```python\ndef f(x):\n    return x + 1\n```\nIt adds 1.", True),
        ("def f(x):\n    return x + 1", True),
        ("```python\ndef f(x):\n    return x + 2\n```", False),
        ("```python\ndef f(x):\n    return (x +", False),  # cut off
        ("def f(x):\n    x = bytearray(1 << 31)\n    return 2", False),  # too much memory
        ("```python\nraise SystemExit(0)\n```", False),  # leaves before the tests
    ],
)
def test_a_function_is_judged_by_its_tests(bench, answer, right):
    assert bench.passes_tests(SUCCESSOR, answer) == right


def test_a_program_without_an_end_is_wrong(bench):
    assert not bench.passes_tests(SUCCESSOR, "```python\nwhile True: pass\n```", seconds=0.5)


@pytest.mark.parametrize("name", ["large", "foreal", "spec_reason", "rpc"])
def test_a_run_goes_on_behind_its_last_batch(bench, name):
    uninterrupted, part, saved = run(bench, name, empty(bench)), empty(bench), []

    def killed():
        saved.append(len(part["right"]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(bench, name, part, save=killed)
    assert saved == [2]
    run(bench, name, part)
    for key in set(bench.EMPTY) - {"seconds", "processor"}:
        assert part[key] == uninterrupted[key], key
    assert [len(uninterrupted[key]) for key in bench.EMPTY] == [3, 3, 5, 5, 5, 5, 5]
    assert all(large <= tokens for large, tokens in zip(uninterrupted["large"], uninterrupted["tokens"], strict=True))
    alone = {"large": uninterrupted["tokens"], "rpc": [0] * 5}
    assert uninterrupted["large"] == alone.get(name, uninterrupted["large"])


def test_compilation_is_not_timed(bench):
    call = bench.make("entropy_adaptive", "gsm8k", history(0), history(1), Words(), 3)
    entry, count = empty(bench), []

    def watched(rows, **options):
        with compiled_programs() as compiled:
            result = call(rows, **options)
        count.append(len(compiled))
        return result

    bench.run_method("entropy_adaptive", watched, PROBLEMS[:4], entry, 2, 3, 48, Words(), "gsm8k", lambda: None)
    assert len(count) == 3 and count[2] == 0 and count[1] < 5  # what cuts a result to length, and no program


def test_samples_of_one_prompt(bench):
    costs = bench.one_prefill(history(0), [[1, 2, 3]], 4, 6)
    assert costs["one prefill"]["temporaries"] > 0 and costs["separate"]["seconds"] > 0


def test_the_table(bench):
    entry = {
        "seconds": [4.0, 6.0], "processor": [8.0, 8.0], "tokens": [10, 30], "large": [10, 10],
        "passes": [[9, 5], [9, 7]], "texts": ["", ""], "right": [True, False],
    }  # fmt: skip
    alone = entry | {"seconds": [2.0], "processor": [2.0], "large": [10, 30]}
    lines = bench.table({"methods": {"large": alone, "foreal": entry, "fs_gen": empty(bench)}}).splitlines()
    assert len(lines) == 4 and lines[3] == "| `foreal` | 1 of 2 | 9 to 91 % | 20 | 50 % | 0.30 | 0.50 | 0.25 |"
    assert "100 %" in lines[2] and lines[2].endswith("| 1.00 | 1.00 |")
