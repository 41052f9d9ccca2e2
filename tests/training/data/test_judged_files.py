"""Files of judged responses: the first wrong token of a response."""

import pytest

from specjax.training.data.judged_files import to_judged


class Bytes:
    """A tokenizer with one token per byte. It decodes each byte of an incomplete character to a character."""

    def chat(self, messages):
        return [1000, 1001]

    def encode(self, text, special=True):
        return list(text.encode())

    def decode(self, ids):
        data = bytes(ids)
        for missing in range(4):
            try:
                return data[: len(data) - missing].decode() + "\ufffd" * missing
            except UnicodeDecodeError:
                continue
        raise AssertionError(data)


@pytest.mark.parametrize(("response", "wrong", "token"), [("abc", 0, 0), ("abc", 2, 2), ("a😀b", 2, 5), ("a😀b", 1, 1)])
def test_the_first_wrong_token_has_the_first_wrong_character(response, wrong, token):
    judged = to_judged({"prompt": "q", "response": response, "wrong": wrong}, Bytes())
    assert judged.text.prompt_length == 2 and judged.wrong == 2 + token
