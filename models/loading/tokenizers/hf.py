"""Tokenizers of Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import check_folder, first_line, quote, read_bytes, read_json_object
from specjax.models.loading.families.config_fields import POSITIONS, ConfigFields
from specjax.models.loading.tokenizers.expansion_limit import MAX_EXPANSION, expansion_factor
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer, end_ids

MAX_MISSING_IDS = 1 << 20  # unused ids below the highest one


def from_folder(folder: Path) -> Tokenizer:
    """Build the tokenizer from tokenizer.json and its companions, or with `transformers` from a tokenizer.model."""
    check_folder(folder)
    backend = _backend(folder)
    factor = expansion_factor(backend)
    if factor > MAX_EXPANSION:
        raise UsageError(
            f"the rules of {folder}/tokenizer.json can make a text {float(factor):.2g} times as long; use another"
        )
    settings = read_json_object(folder / "tokenizer_config.json") or {}
    by_piece = backend.get_vocab(with_added_tokens=True)
    highest = max(by_piece.values(), default=-1)
    if highest >= len(by_piece) + MAX_MISSING_IDS:
        raise UsageError(f"{folder} has {len(by_piece)} tokens but the token id {highest}; download it again")
    vocab = [""] * (highest + 1)
    for piece, i in by_piece.items():
        vocab[i] = piece
    names = {key: text for key, value in settings.items() if key.endswith("_token") and (text := _token_text(value))}
    end_tokens: list[int] = [by_piece[names["eos_token"]]] if names.get("eos_token") in by_piece else []
    for file in ("generation_config.json", "config.json"):
        config = ConfigFields(read_json_object(folder / file) or {}, str(folder / file))
        end_tokens += _eos_ids(config if config.is_stated("eos_token_id") else config.subfields("text_config"))
    control = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
    return Tokenizer(
        LibraryCodec(backend),
        tuple(vocab),
        end_ids(vocab, control, end_tokens),
        _chat_template(folder, settings),
        names,
    )


def _eos_ids(config: ConfigFields) -> list[int]:
    """Read one id, several or none."""
    several = isinstance(config.value("eos_token_id"), list)
    eos = config.array("eos_token_id", int) if several else [config.size("eos_token_id", None, minimum=0)]
    ids = [i for i in eos if i is not None]
    if not all(0 <= i <= POSITIONS for i in ids):
        raise UsageError(f"{config.where} has {config.prefix}eos_token_id {quote(ids)}, which must be token ids")
    return ids


def _backend(folder: Path):
    file = folder / "tokenizer.json"
    if file.exists():
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            message = f"{file} is not a tokenizer that the tokenizers library can read ({first_line(error)})"
            raise UsageError(message) from None
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

    logging.set_verbosity_error()  # its warnings quote unescaped names from the folder
    try:  # never run code from the folder
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return tokenizer.backend_tokenizer
    except Exception as error:
        raise UsageError(
            f"the tokenizer of {folder} cannot be read without a tokenizer.json; specjax never runs code of a model "
            f"({first_line(error)}); download the whole repository"
        ) from None


def _chat_template(folder: Path, settings: dict):
    """Return the default template: a separate file in newer folders, a field of tokenizer_config.json in older ones."""
    file = folder / "chat_template.jinja"
    if file.exists():
        content = read_bytes(file)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return content  # `Tokenizer.chat` refuses it
    template = settings.get("chat_template")
    if not isinstance(template, list):
        return template
    named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
    return named[-1].get("template") if named else None


def _token_text(token) -> str | None:
    """Return the text of a special token, which is stored as a string or an object."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None
