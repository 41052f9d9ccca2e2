"""llm-comply (MIT), which compares answers with OpenAI's own schema, against a server whose model ends its texts."""

import json
import subprocess
import sys

import pytest
from served import build_setup, running

from specjax.server.sampling import make_processors

pytest.importorskip("llm_comply", reason="llm-comply is not installed; make test-peers installs it")
ENDS = {2: 400.0, ord('"') - 29: 300.0, ord("}") - 29: 200.0}
"""Biases of a random model, so that a text or the arguments of a call end as soon as they may."""
COMMAND = ("-m", "llm_comply.cli", "--format", "openai-chat", "-k", "x", "-m", "tiny", "--json")


def test_all_that_a_model_of_text_can_answer():
    ours = make_processors(bias=ENDS, length=3, ends=(2,), room=4)
    with running(setup=build_setup(processors=ours)) as server:
        command = [sys.executable, *COMMAND, "-u", f"{server.url}/v1"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    results = {result["id"]: result for result in json.loads(output.stdout)["results"]}
    assert not any("warnings" in result for result in results.values()), results
    image, reasoning = results.pop("chat-image-input"), results.pop("chat-reasoning-summary")
    assert image["errors"][0].startswith("HTTP 400")  # the model reads text only, so that 400 is the right answer
    assert reasoning["status"] == "skipped"  # by its own rule: the name is not that of a reasoning model
    assert len(results) == 7 and {result["status"] for result in results.values()} == {"passed"}, results
