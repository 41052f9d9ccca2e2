"""T5 in ONNX: the names of nodes lead to the modules, in floats and in int8."""

import jax
import numpy as np
import pytest
import tokenizers

import specjax
from specjax import UsageError

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 24, "d_model": 16, "d_kv": 12, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2,
    "relative_attention_num_buckets": 8, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip


def write_tokenizer(folder):
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 24)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def quantize(x):
    """Return codes uint8, a scale and an offset of an array, as onnxruntime does."""
    low, high = min(x.min(), 0.0), max(x.max(), 0.0)
    scale = np.float32((high - low) / 255)
    offset = np.uint8(np.round(-low / scale))
    return np.clip(np.round(x / scale) + offset, 0, 255).astype(np.uint8), scale, offset


def write_graph(file, tensors, prefix, quantized):
    """Write a graph with the nodes that read weights, under the names that torch and onnxruntime give."""
    nodes, stored, read = [], [], {}
    for number, (name, x) in enumerate(tensors.items()):
        module = f"{prefix}.{name}".removesuffix(".weight")
        if x.ndim == 1:
            stored.append(onnx.numpy_helper.from_array(x, f"{module}.weight"))
            continue
        is_table = module.endswith(("shared", "embed_tokens", "relative_attention_bias"))
        stem = f"{module}.weight" if is_table else f"onnx::MatMul_{number}"
        matrix = x if is_table else np.ascontiguousarray(x.T)
        parts = [(stem, matrix)]
        read[f"{name.removesuffix('.weight')}.weight"] = x
        if quantized:
            codes, scale, offset = quantize(matrix)
            parts = [(f"{stem}_quantized", codes), (f"{stem}_scale", scale), (f"{stem}_zero_point", offset)]
            expanded = (codes.astype(np.float32) - np.float32(offset)) * scale
            read[f"{name.removesuffix('.weight')}.weight"] = expanded if is_table else expanded.T
        stored += [onnx.numpy_helper.from_array(np.asarray(part), title) for title, part in parts]
        kind = "Gather" if is_table else "MatMulInteger" if quantized else "MatMul"
        leaf = "Gather" if is_table else "MatMul_quant" if quantized else "MatMul"
        path = "/" + module.replace(".", "/").replace("block/", "block.").replace("layer/", "layer.") + f"/{leaf}"
        nodes.append(onnx.helper.make_node(kind, ["x", parts[0][0]], [f"y{number}"], name=path))
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "graph", [], [], stored)), file)
    return read


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES)).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.randn(24, 16))
    return model


def write_folder(folder, model, quantized):
    """Write both graphs. Return the weights that they have, by their names in a checkpoint of Hugging Face."""
    state = {name: x.numpy() for name, x in model.state_dict().items() if "embed_tokens" not in name}
    encoder = {name.removeprefix("encoder."): x for name, x in state.items() if name.startswith("encoder.")}
    decoder = {name: x for name, x in state.items() if not name.startswith("encoder.")}
    read = write_graph(
        folder / "encoder.onnx", encoder | {"embed_tokens.weight": state["shared.weight"]}, "enc", quantized
    )
    first = {f"encoder.{name}": x for name, x in read.items() if name != "embed_tokens.weight"}
    return state | first | write_graph(folder / "decoder.onnx", decoder, "m", quantized)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_model_in_onnx_is_that_of_its_weights(model, quantized, tmp_path):
    graphs, folder = tmp_path / "graphs", tmp_path / "folder"
    graphs.mkdir()
    weights = write_folder(graphs, model, quantized)
    model.save_pretrained(folder)
    from safetensors.numpy import load_file, save_file

    names = load_file(folder / "model.safetensors")
    save_file({name: np.ascontiguousarray(weights[name]) for name in names}, folder / "model.safetensors")
    for place in (graphs, folder):
        write_tokenizer(place)
    ours, theirs = (specjax.load(place)[0] for place in (graphs, folder))
    skipped = {"name": "", "max_positions": 0}
    fields = lambda target: {k: v for k, v in vars(target.model.config).items() if k not in skipped}
    assert fields(ours) == fields(theirs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), ours.params, theirs.params)


def test_other_graphs_are_refused(model, tmp_path):
    write_folder(tmp_path, model, False)
    write_tokenizer(tmp_path)
    graph = onnx.load(tmp_path / "encoder.onnx")
    for node in graph.graph.node:
        node.name = node.name.replace("SelfAttention", "attention")
    onnx.save(graph, tmp_path / "encoder.onnx")
    with pytest.raises(UsageError, match=r"has no matrix encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight"):
        specjax.load(tmp_path)
    (tmp_path / "encoder.onnx").write_bytes(b"no graph")
    with pytest.raises(UsageError, match="no graph that the library onnx reads"):
        specjax.load(tmp_path)
