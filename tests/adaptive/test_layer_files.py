"""Files of trained arrays with one entry per layer."""

import numpy as np
import pytest
import safetensors.numpy
import torch

from specjax import UsageError, adaptive

ARRAYS = np.arange(8, dtype=np.float32).reshape(2, 4), np.array([0.5, -1], np.float32)


@pytest.mark.parametrize(("name", "kind"), [("probes", adaptive.Probes), ("routers", adaptive.Routers)])
def test_saved_arrays_are_read(tmp_path, name, kind):
    file = tmp_path / "new" / "arrays.safetensors"
    save, read = (getattr(adaptive, f"{verb}_{name}") for verb in ("save", "read"))
    save(file, kind(*ARRAYS))
    result = read(str(file))
    assert isinstance(result, kind)
    for array, wanted in zip(result, ARRAYS, strict=True):
        np.testing.assert_array_equal(array, wanted)
    with pytest.raises(UsageError, match=r"must end in \.safetensors"):
        save(tmp_path / "arrays.bin", kind(*ARRAYS))


def test_the_state_of_a_torch_model_is_read(tmp_path):
    """Read a linear layer with one output per layer, as PyTorch saves it."""
    layers = [torch.nn.Linear(4, 1) for _ in range(2)]
    state = {f"layers.{i}.router.{name}": x for i, layer in enumerate(layers) for name, x in layer.state_dict().items()}
    torch.save(state, tmp_path / "routers.pt")
    result = adaptive.read_routers(tmp_path / "routers.pt")
    np.testing.assert_array_equal(result.weight, np.concatenate([layer.weight.detach() for layer in layers]))
    np.testing.assert_array_equal(result.bias, np.concatenate([layer.bias.detach() for layer in layers]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.layers.0.probe.weight": np.zeros((1, 4))}, r"probe\.weight.*not only routers of layers"),
        ({"model.layers.1.router.bias": None}, r"has no array layers\.1\.router\.bias"),
        ({"model.layers.1.router.weight": np.zeros((1, 5))}, r"of shape \[1, 5\], and that of layer 0 is \[1, 4\]"),
        ({"model.layers.1.router.weight": np.full((1, 4), np.nan)}, "not finite"),
        ({f"model.layers.{i}.router.bias": np.zeros(2) for i in (0, 1)}, r"they must be \[1, width\] and \[1\]"),
        ({"model.layers.9999.router.bias": np.zeros(1)}, "not only routers"),
    ],
)
def test_other_files_are_refused(tmp_path, changes, words):
    file = tmp_path / "routers.safetensors"
    adaptive.save_routers(file, adaptive.Routers(*ARRAYS))
    tensors = safetensors.numpy.load_file(file) | changes
    arrays = {name: np.asarray(x, np.float32) for name, x in tensors.items() if x is not None}
    safetensors.numpy.save_file(arrays, file)
    with pytest.raises(UsageError, match=words):
        adaptive.read_routers(file)


@pytest.mark.parametrize(("name", "words"), [("none.safetensors", "there is no file"), ("a.txt", "is not a .saf")])
def test_missing_files_are_refused(tmp_path, name, words):
    with pytest.raises(UsageError, match=words):
        adaptive.read_probes(tmp_path / name)
