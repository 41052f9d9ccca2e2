"""Tokenizers of Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import check_folder, first_line, quote, read_bytes, read_json_object
from specjax.models.loading.families.config_fields import POSITIONS, ConfigFields
from specjax.models.loading.tokenizers.expansion_limit import MAX_EXPANSION, expansion_factor
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer, end_ids

MOST_HOLES = 1 << 20  # ids below the highest that no token has


def from_folder(folder: Path) -> Tokenizer:
    """From tokenizer.json and its companions, or through `transformers` where there is only a tokenizer.model."""
    check_folder(folder)
    backend = _backend(folder)
    times = expansion_factor(backend)
    if times > MAX_EXPANSION:
        raise UsageError(f"the rules of {folder}/tokenizer.json can make a text {float(times):.2g} times as long")
    settings = read_json_object(folder / "tokenizer_config.json") or {}
    by_piece = backend.get_vocab(with_added_tokens=True)
    highest = max(by_piece.values(), default=-1)
    if highest >= len(by_piece) + MOST_HOLES:
        raise UsageError(f"{folder} has a vocabulary of {len(by_piece)} tokens with the id {highest}; it is damaged")
    vocab = [""] * (highest + 1)
    for piece, i in by_piece.items():
        vocab[i] = piece
    names = {key: text for key, value in settings.items() if key.endswith("_token") and (text := _content(value))}
    stated: list[int] = [by_piece[names["eos_token"]]] if names.get("eos_token") in by_piece else []
    for file in ("generation_config.json", "config.json"):
        config = ConfigFields(read_json_object(folder / file) or {}, str(folder / file))
        stated += _eos(config if "eos_token_id" in config.values else config.subfields("text_config"))
    control = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
    return Tokenizer(
        LibraryCodec(backend), tuple(vocab), end_ids(vocab, control, stated), _chat_template(folder, settings), names
    )


def _eos(config: ConfigFields) -> list[int]:
    """One id, several or none."""
    several = isinstance(config.values.get(f"{config.prefix}eos_token_id"), list)
    eos = config.array("eos_token_id", int) if several else [config.size("eos_token_id", None, minimum=0)]
    found = [i for i in eos if i is not None]
    if not all(0 <= i <= POSITIONS for i in found):
        raise UsageError(f"{config.where} has {config.prefix}eos_token_id {quote(found)}, which must be token ids")
    return found


def _backend(folder: Path):
    file = folder / "tokenizer.json"
    if file.exists():
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            what = f"{file} is not a tokenizer that the tokenizers library can read ({first_line(error)})"
            raise UsageError(what) from None
        backend.no_truncation()
        backend.no_padding()
        return backend
    if not (folder / "tokenizer.model").exists() and not (folder / "vocab.json").exists():
        raise UsageError(
            f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); download the whole repository"
        )
    with optional_import("transformers", f"the tokenizer of {folder} has no tokenizer.json, and without it needs"):
        from transformers import AutoTokenizer
        from transformers.utils import logging

    logging.set_verbosity_error()  # it quotes names out of the folder as they are
    try:  # it would ask whether to run code out of the folder: never
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return found.backend_tokenizer
    except Exception as error:
        raise UsageError(
            f"the tokenizer of {folder} cannot be read without its tokenizer.json, and code that comes with a model is "
            f"never run ({first_line(error)}); download the whole repository"
        ) from None


def _chat_template(folder: Path, settings: dict):
    """The default template: a file of its own in newer folders, a field of tokenizer_config.json in older ones."""
    file = folder / "chat_template.jinja"
    if file.exists():
        content = read_bytes(file)
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
