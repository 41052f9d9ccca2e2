"""Tokenizers of Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from specjax.errors import UsageError
from specjax.models.loading.hf import read_json
from specjax.models.loading.tokenizer import LibraryCodec, Tokenizer, end_ids


def from_folder(folder: Path) -> Tokenizer:
    """From tokenizer.json and its companions, or through `transformers` where there is only a tokenizer.model."""
    backend = _backend(folder)
    settings = read_json(folder / "tokenizer_config.json") or {}
    by_piece = backend.get_vocab(with_added_tokens=True)
    vocab = [""] * (max(by_piece.values(), default=-1) + 1)
    for piece, i in by_piece.items():
        vocab[i] = piece
    names = {key: text for key, value in settings.items() if key.endswith("_token") and (text := _content(value))}
    stated: list[int] = [by_piece[names["eos_token"]]] if names.get("eos_token") in by_piece else []
    for file in ("generation_config.json", "config.json"):
        config = read_json(folder / file) or {}
        eos = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        stated += eos if isinstance(eos, list) else [eos] if eos is not None else []
    control = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
    return Tokenizer(
        LibraryCodec(backend), tuple(vocab), end_ids(vocab, control, stated), _chat_template(folder, settings), names
    )


def _backend(folder: Path):
    file = folder / "tokenizer.json"
    if file.exists():
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise UsageError(f"{file} is not a tokenizer that the tokenizers library can read ({error})") from None
        backend.no_truncation()
        backend.no_padding()
        return backend
    if not (folder / "tokenizer.model").exists() and not (folder / "vocab.json").exists():
        raise UsageError(
            f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); download the whole repository"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as error:
        raise UsageError(f"the tokenizer of {folder} cannot be read ({str(error).splitlines()[0]})") from None


def _chat_template(folder: Path, settings: dict):
    """The default template: a file of its own in newer folders, a field of tokenizer_config.json in older ones."""
    file = folder / "chat_template.jinja"
    if file.exists():
        content = file.read_bytes()
        try:
            return content.decode()
        except UnicodeDecodeError:
            return content  # which `Tokenizer.chat` refuses
    template = settings.get("chat_template")
    if not isinstance(template, list):
        return template
    named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
    return named[-1].get("template") if named else None


def _content(token) -> str | None:
    """The piece of a special token, which is a string or an object."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None
