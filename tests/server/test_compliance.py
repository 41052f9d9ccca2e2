"""The checks of llm-comply, with the schemas of OpenAI. The one of images needs a model that reads images."""

import json
import subprocess
import sys

import pytest

TEXT_CHECKS = 8


def test_all_checks_of_text_models(server):
    pytest.importorskip("llm_comply")
    pytest.importorskip("outlines_core")
    done = subprocess.run(
        [sys.executable, "-m", "llm_comply.cli", "--format", "openai-chat", "-u", f"{server.url}/v1", "-k", "x", "-m",
         "tiny", "--json"], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    results = {each["id"]: each for each in json.loads(done.stdout)["results"]}
    failed = {name: each for name, each in results.items() if each["status"] != "passed"}
    assert set(failed) == {"chat-image-input"} and len(results) == TEXT_CHECKS + 1, failed
