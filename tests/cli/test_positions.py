"""--max-positions, of every command that decodes or trains."""

import json

import pytest


@pytest.mark.parametrize("command", ["generate", "explain", "chat", "bench", "train"])
def test_no_more_than_the_model_takes(refused, tmp_path, command):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["hello"]}) + "\n")
    arguments = {
        "generate": ("hello",), "explain": ("hello",), "chat": (), "bench": (prompts, "--out", tmp_path / "bench.json"),
        "train": ("--prompts", prompts, "--out", tmp_path / "head"),
    }[command]  # fmt: skip
    message = refused(command, *arguments, "--max-positions", 513)
    assert "--max-positions must be from 1 to 512, the limit of tiny, not 513" in message


def test_a_text_is_no_longer(refused, tmp_path):
    message = refused("generate", "hello", "--max-positions", 20, "--max-new-tokens", 30)
    assert "20" in message and "512" not in message
    assert "--context must be at most 88 for this model" in refused(
        "chat", "--max-positions", 100, "--max-new-tokens", 12, "--context", 300
    )
    assert "--length 64 is more than the 40 tokens" in refused(
        "train", "--own-prompts", 2, "--out", tmp_path / "head", "--length", 64, "--max-positions", 40
    )
