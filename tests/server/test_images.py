"""Images in chats of the server: data URLs, limits, and texts equal to those of `decode`."""

import base64
import io

import httpx
import jax
import numpy as np
import PIL.Image
import pytest
from image_heads import vision_target
from image_models import write_processor, write_tokenizer
from served import ask, running

import specjax
from specjax import UsageError
from specjax.models import images, load_image_processor
from specjax.models.loading import load_tokenizer
from specjax.server.images import ImageReader, decode_url
from specjax.server.sampling import serve_options

pytest.importorskip("transformers")


def picture(seed):
    """Return the bytes of a PNG."""
    values = np.random.default_rng(seed).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


def one_color(side):
    """Return the bytes of a small PNG with many pixels."""
    buffer = io.BytesIO()
    PIL.Image.new("1", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def part(data, kind="png"):
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}


def chat(*content, **fields):
    messages = [{"role": "user", "content": list(content)}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12} | fields


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    write_tokenizer(folder)
    write_processor(folder, do_image_splitting=False)
    target = vision_target()
    return ImageReader(target, load_image_processor(folder, target, load_tokenizer(str(folder))), 2)


@pytest.fixture(scope="module")
def url(reader):
    tokenizer = reader.processor.tokenizer
    setup = specjax.serve(
        reader.target, None, slots=2, longest_prompt=96, max_new_tokens=16, tokenizer=tokenizer, eos=tokenizer.eos,
        temperature=1.0, min_p=0.0, prefix_gib=0, constraint_mib=0, inputs=reader.blank,
        **serve_options(reader.target.model.vocab_size, tuple(tokenizer.eos)),
    ).setup  # fmt: skip
    with running(setup=setup, images=reader, tokenizer=tokenizer) as server:
        yield server.url


def expected(reader, text, *pictures):
    """Return the text of `decode` for the same chat."""
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    files = [io.BytesIO(data) for data in pictures]
    ids, tiles = reader.processor.chat([{"role": "user", "content": content}], files)
    inputs = images(reader.target, [ids], [tiles], num_tiles=2)
    tokenizer = reader.processor.tokenizer
    result = specjax.decode(
        reader.target, None, [ids], key=jax.random.key(0)[None], max_new_tokens=12, inputs=inputs, eos=tokenizer.eos
    )
    return tokenizer.decode([token for token in result.to_lists()[0] if token not in tokenizer.eos])


def answer(url, body):
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("seeds", [(), (1,), (1, 2)])
def test_texts_are_those_of_decode(url, reader, seeds):
    pictures = [picture(seed) for seed in seeds]
    body = chat(*map(part, pictures), {"type": "text", "text": "w5 w6"})
    assert answer(url, body) == expected(reader, "w5 w6", *pictures)


def test_images_change_the_text(url):
    texts = {answer(url, chat(part(picture(seed)), {"type": "text", "text": "w5 w6"})) for seed in range(4)}
    assert len(texts) > 1


def test_tokens_of_a_chat_with_an_image(url):
    messages = chat(part(picture(1)), {"type": "text", "text": "w5"})["messages"]
    count = httpx.post(f"{url}/tokenize", json={"messages": messages}).json()["count"]
    assert count > 9  # placeholders of one tile


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([part(b"no image")], "cannot be read as an image"),
        ([part(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")], "cannot be read as an image"),
        ([part(one_color(9000))], "the images have 81000000 pixels"),
        ([part(picture(1))] * 3, "the prompt has 3 images, and this server takes at most 2 per prompt"),
        ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "the server downloads nothing"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}], "not valid base64"),
        ([{"type": "image_url"}], "a part image_url needs"),
        ([{"type": "input_audio"}], "leave out the part of type input_audio"),
    ],
)
def test_refusals(url, content, words):
    response = httpx.post(f"{url}/v1/chat/completions", json=chat(*content), timeout=60)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_only_users_have_images(url):
    body = {"model": "tiny", "messages": [{"role": "system", "content": [part(picture(1))]}]}
    assert "only messages of the user" in httpx.post(f"{url}/v1/chat/completions", json=body).text


def test_a_server_of_text_refuses_images():
    response = ask("POST", "/v1/chat/completions", json=chat(part(picture(1))))
    assert response.status_code == 400 and "start it with --image-tiles" in response.json()["error"]["message"]


def test_inputs_of_requests_are_in_the_memory_of_the_host(reader):
    turns = [{"role": "user", "content": [{"type": "image"}]}]
    _, inputs = reader.read(turns, [picture(1)], {})
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves((inputs, reader.blank)))


def test_data_urls():
    assert decode_url(part(b"abc")["image_url"]["url"]) == b"abc"
    with pytest.raises(UsageError, match="must be a data URL"):
        decode_url("data:text/plain;base64,YWJj")
