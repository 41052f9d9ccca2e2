"""A server for all tests of a process."""

import pytest
from served import running


@pytest.fixture(scope="session")
def server():
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def client(server):
    import openai  # which `make test-peers` does not install

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
        yield client
