"""The description of a model as lines of text, and as a JSON document."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.planning.description.layers import Kind, LayerPattern
from specjax.planning.description.model import ImageReading, ModelDescription, RowMemory
from specjax.planning.description.module import ModuleDescription

MIXERS = {
    "attention": ("attention layer", "attention layers"),
    "latent_attention": ("layer of latent attention", "layers of latent attention"),
    "windowed_attention": ("layer of sliding-window attention", "layers of sliding-window attention"),
    "gated_delta": ("gated delta net", "gated delta nets"),
    "mamba2": ("Mamba-2 layer", "Mamba-2 layers"),
    "short_convolution": ("short convolution", "short convolutions"),
    "attention_and_mamba2": ("layer of attention beside Mamba-2", "layers of attention beside Mamba-2"),
}
FEEDS = {
    "gated": ("gated MLP", "gated MLPs"),
    "relu2": ("MLP with squared ReLU", "MLPs with squared ReLU"),
    "moe": ("mixture of experts", "mixtures of experts"),
    "none": ("layer without parameters", "layers without parameters"),
}

PARTS = "kind", "layers", "sizes", "memory", "module", "images"
"""Fields of a description that its document has in another form."""

MAX_NUMBERS = 16
"""The most numbers of layers that a line lists."""


def describe_in_lines(model: ModelDescription) -> list[str]:
    """Return the description in lines of text."""
    kind = "diffusion model" if model.kind == "diffusion" else "model"
    stored = model.dtype if model.formats is None else f"{model.formats} and {model.dtype}"
    lines = [
        f"{kind} {model.name}: {_parameters(model)}, {size(model.weights_bytes)} in {stored}",
        f"{model.vocab_size:,} tokens in its vocabulary, {model.max_positions:,} tokens in its longest text",
        f"layers: {layers_in_words(model.layers)}",
        *(f"{_mixer_title(name)}: {_sizes_in_words(name, sizes)}" for name, sizes in model.sizes.items()),
        *_memory_lines(model.memory, model.layers),
        *([] if model.images is None else [f"images: {_images_in_words(model.images)}"]),
    ]
    if model.kind == "diffusion" and model.module is None:
        return lines
    return [*lines, f"multi-token prediction: {module_in_words(model.module)}"]


def document_of(model: ModelDescription) -> dict[str, Any]:
    """Return the description as JSON. Sizes are in bytes."""
    layers, memory = model.layers, model.memory
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    as_dict = lambda kind, count: {**kind._asdict(), "count": count}
    return {
        "kind": "model",
        **{
            name: fields[name]
            for name in fields
            if name not in ("kind", "layers", "sizes", "memory", "module", "images")
        },
        "decoding": model.kind,
        "layers": {
            "count": len(layers.kinds),
            "kinds": [as_dict(kind, count) | {"layers": layers.numbers(kind)} for kind, count in layers.counts.items()],
            "group": [as_dict(kind, count) for kind, count in layers.group],
            "groups": layers.num_groups,
            "words": layers_in_words(layers),
        },
        "sizes": model.sizes,
        "memory": {"per_row": memory.per_row, **dataclasses.asdict(memory)},
        "module": None if model.module is None else dataclasses.asdict(model.module),
        "images": None if model.images is None else dataclasses.asdict(model.images),
    }


def _images_in_words(images: ImageReading) -> str:
    """Return for example "16 vectors per tile of 64 x 64 pixels, by a tower of 2 layers with 51,000 parameters"."""
    if images.block is None:
        sizes = f"{images.vectors} vectors per tile of {images.tile} x {images.tile} pixels"
    else:
        sizes = f"one vector per {images.block} x {images.block} pixels of images of any size"
    layers = f"{images.layers} layer" + "s" * (images.layers != 1)
    return f"{sizes}, by a tower of {layers} with {images.parameters:,} parameters"


def layers_in_words(layers: LayerPattern) -> str:
    """Return for example "24 gated delta nets and 8 attention layers, in 8 groups of 3 + 1, each with a gated MLP"."""
    counts, feeds = layers.counts, {kind.feed for kind in layers.kinds}
    words = _joined([_kind_in_words(kind, count, len(feeds) > 1) for kind, count in counts.items()])
    if len(counts) > 1:
        words += _order_in_words(layers)
    if len(feeds) > 1:
        return words
    return words + (", each without an MLP" if feeds == {"none"} else f", each with a {FEEDS[next(iter(feeds))][0]}")


def _kind_in_words(kind: Kind, count: int, names_feed: bool) -> str:
    if kind.mixer == "none":
        return f"{count} {FEEDS[kind.feed][count > 1]}"
    words = f"{count} {MIXERS[kind.mixer][count > 1]}"
    if kind.shares_keys:
        words += " with the keys of an earlier layer"
    if not names_feed or kind.feed == "none":
        return words
    return f"{words} with {FEEDS[kind.feed][1]}" if count > 1 else f"{words} with a {FEEDS[kind.feed][0]}"


def _order_in_words(layers: LayerPattern) -> str:
    """Return the pattern of the layers: the runs of the repeating group, or the numbers of the rarest kind."""
    runs = " + ".join(str(length) for _, length in layers.group)
    if layers.num_groups > 1:
        return f", in {layers.num_groups} groups of {runs}"
    if len(layers.counts) == 2:
        rarest = list(layers.counts)[-1]
        numbers = layers.numbers(rarest)
        if len(numbers) <= MAX_NUMBERS:
            words = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {_joined([str(n) for n in numbers])}"
            return f" ({words}, counted from 0)"
    return ", in an order that does not repeat"


def _parameters(model: ModelDescription) -> str:
    active = f", {model.active_parameters:,} of them for each token" * (model.active_parameters < model.parameters)
    return f"{model.parameters:,} parameters{active}"


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _mixer_title(name: str) -> str:
    titles = {
        "attention": "attention",
        "latent_attention": "latent attention",
        "windowed_attention": "sliding-window attention",
        "mamba2": "Mamba-2",
    }
    return titles.get(name, MIXERS.get(name, (name,))[0])


def _sizes_in_words(name: str, sizes: dict[str, Any]) -> str:
    if name in ("attention", "windowed_attention"):
        rotated, window = sizes["rotated"], sizes["window"]
        words = f"{sizes['heads']} heads of {sizes['head_dim']} numbers, {_count(sizes['kv_heads'], 'key/value head')}"
        words += ", no rotation" if not rotated else f", {rotated} numbers rotated"
        words += "" if window is None else f", windows of {window:,} tokens"
        words += ", output gates" if sizes["output_gate"] else ""
        return words + (", attention sinks" if sizes["sinks"] else "")
    if name == "latent_attention":
        queries = "" if sizes["query_rank"] is None else f", queries from vectors of {sizes['query_rank']:,}"
        return (
            f"{sizes['heads']} heads, {sizes['cached']} cached numbers per token and layer, {sizes['rotated']} of them "
            f"rotated, values of {sizes['value_dim']}{queries}"
        )
    if name == "gated_delta":
        return (
            f"{sizes['key_heads']} key heads and {sizes['value_heads']} value heads, states of {sizes['key_dim']} x "
            f"{sizes['value_dim']}, convolutions of {sizes['taps']} taps"
        )
    if name == "experts":
        shared = f", and a shared MLP of {sizes['shared_width']:,}" if sizes["shared_width"] else ""
        return f"{sizes['chosen']} of {sizes['count']:,} for each token, {sizes['width']:,} hidden units each{shared}"
    if name == "mamba2":
        return (
            f"{sizes['heads']} heads in {_count(sizes['groups'], 'group')}, states of {sizes['head_dim']} x "
            f"{sizes['state_dim']}, convolutions of {sizes['taps']} taps"
        )
    return f"{sizes['channels']:,} channels, {sizes['taps']} taps"


def _memory_lines(memory: RowMemory, layers: LayerPattern) -> list[str]:
    parts = [(memory.states, "of states"), (memory.windows, "of convolution windows")]
    row = " and ".join(f"{size(count)} {words}" for count, words in parts if count)
    attending = layers.count_attention()
    cached = f"keys and values of {attending} {MIXERS['attention'][attending > 1]}" if attending else "no layer attends"
    return [
        f"memory per row, for a text of any length: {row or 'none'}",
        f"memory per token of a row: {size(memory.per_token)}, {cached}",
        f"memory per drafted token, until its commit: {size(memory.per_node)}",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def module_in_words(module: ModuleDescription | None) -> str:
    """Return what a module is, and how it is used by default."""
    if module is None:
        return "no module in its files; `specjax train --method mtp` makes one"
    noun = "1 module" if module.count == 1 else f"{module.count} modules, one for each depth"
    if module.dialect is None:
        return f"{noun} by its config, which cannot draft, because {module.reason}"
    form = f"{noun} of the form {module.dialect} ({module.families})"
    if module.reason is not None:
        return f"{form}, which cannot draft: {module.reason}"
    assert module.parameters is not None and module.weights_bytes is not None
    owner = "the target's embedding and output layer"
    if module.output_layer == "module":
        owner = "the target's embedding and an output layer of its own"
    use = "it drafts by default, together with copies (method auto); --draft native --method mtp drafts with it alone"
    return (
        f"{form}, {module.parameters:,} parameters, {size(module.weights_bytes)}, with {owner}; it reads the target's "
        f"{'hidden state after' if module.hidden == 'normed' else 'hidden state before'} the final norm; "
        + (use if module.drafts_by_default else "the target does not use it by default")
    )


def size(count: float) -> str:
    """Return a number of bytes in words, with three digits from 10,000 bytes on."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 10 * factor or (count >= factor and unit != "kB"):
            return f"{float(f'{count / factor:.3g}'):g} {unit}"
    return f"{count:,.0f} bytes"
