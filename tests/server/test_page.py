"""The page of a chat, in a real browser."""

import json

import pytest
from browser import CHROMIUM, browser
from served import LetterTokenizer, expected

SEND = "document.getElementById('prompt').value = {}; document.getElementById('form').requestSubmit()"
IDLE = "document.getElementById('send').textContent === 'Send' && running === null"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_chat_on_the_page(server, tmp_path):
    tokenizer = LetterTokenizer()
    with browser(tmp_path) as page:
        page.send("Page.navigate", url=server.url)
        page.wait("document.getElementById('model')?.textContent === 'tiny'")
        page.run("document.getElementById('temperature').value = 0; document.getElementById('length').value = 40")
        question = "<b>abab</b>"
        page.run(SEND.format(json.dumps(question)))
        page.wait(f"document.querySelector('.assistant')?.textContent.length > 5 && {IDLE}")
        ids = tokenizer.chat([{"role": "user", "content": question}])
        text = page.run("document.querySelector('.assistant').textContent")
        assert text == tokenizer.decode(expected(ids, temperature=0.0))
        assert page.run("document.querySelector('.user').textContent") == question
        drafted = page.run("[...document.querySelectorAll('.drafted')].map(x => x.textContent).join('')")
        assert 0 < len(drafted.removesuffix("Green")) < len(text)
        stats = page.run("document.getElementById('stats').textContent")
        assert "per pass" in stats and "% of drafts accepted" in stats and "tokens/s" in stats
        page.run("document.getElementById('length').value = 999")
        page.run(SEND.format('"again"'))
        page.wait(f"document.querySelector('.error') !== null && {IDLE}")
        assert "max_tokens is 999" in page.run("document.querySelector('.error').textContent")
        assert page.run("turns.length") == 2
        page.run("document.getElementById('clear').click()")
        assert page.run("document.getElementById('log').childNodes.length") == 0
        assert all("400" in problem for problem in page.problems), page.problems
        page.screenshot(tmp_path / "page.png")
