"""Fields of tokenizer_config.json that no code reads are named; settings of transformers need no naming."""

import json
import warnings

import pytest

from specjax.errors import CheckpointWarning
from specjax.models.loading.tokenizers.hf import from_folder

OF_TRANSFORMERS_4 = {
    "add_prefix_space": False, "added_tokens_decoder": {}, "additional_special_tokens": ["<s>"], "bos_token": "<s>",
    "clean_up_tokenization_spaces": True, "eos_token": "</s>", "errors": "replace", "extra_special_tokens": {},
    "legacy": False, "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072,
    "pad_token": None, "padding_side": "left", "sp_model_kwargs": {}, "spaces_between_special_tokens": False,
    "split_special_tokens": False, "tokenizer_class": "PreTrainedTokenizerFast", "truncation_side": "left",
    "unk_token": None, "use_default_system_prompt": False, "chat_template": "{{ messages }}",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1, "<s>": 2, "</s>": 3}, "<unk>"))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def settings(folder, values: dict) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_settings_that_transformers_writes_are_read_without_a_word(folder):
    transformers = pytest.importorskip("transformers")
    library = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>")
    library.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_folder(folder)
        settings(folder, OF_TRANSFORMERS_4)
        from_folder(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("split_special_tokens", True),
        ("sp_model_kwargs", {"alpha": 0.1}),
        ("byte_fallback", True),
        ("add_bos_token", 1),
    ],
)
def test_settings_that_change_token_ids_are_named(name, value, folder):
    settings(folder, OF_TRANSFORMERS_4 | {name: value})
    with pytest.warns(CheckpointWarning, match=f"tokenizer_config.json has a field that is not read, .*: {name}$"):
        from_folder(folder)


def test_a_bos_that_the_tokenizer_adds_needs_no_word(folder):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    backend.save(str(folder / "tokenizer.json"))
    settings(folder, OF_TRANSFORMERS_4 | {"add_bos_token": True, "add_eos_token": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_folder(folder)
    settings(folder, OF_TRANSFORMERS_4 | {"add_bos_token": False, "add_eos_token": True})
    with pytest.warns(CheckpointWarning, match=r"2 fields that are not read, .*: add_bos_token, add_eos_token$"):
        from_folder(folder)


@pytest.mark.parametrize(
    ("file", "values", "names"),
    [
        ("special_tokens_map.json", {"bos_token": "<s>", "sep_tokens": ["</s>"]}, "a field that is.*: sep_tokens"),
        ("special_tokens_map.json", {"bos_token": 7, "cls": "<s>"}, "2 fields that are not read.*: bos_token, cls"),
        ("special_tokens_map.json", {"additional_special_tokens": "<s>"}, ".*: additional_special_tokens"),
        ("tokenizer_config.json", {"eos_token": ["</s>"]}, "a field that is not read.*: eos_token"),
    ],
)  # fmt: skip
def test_special_tokens_that_no_code_reads_are_named(file, values, names, folder):
    (folder / file).write_text(json.dumps(values))
    with pytest.warns(CheckpointWarning, match=f"{file} has .*{names}$"):
        from_folder(folder)


def test_special_tokens_that_are_read_need_no_word(folder):
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>", "lstrip": False}, "pad_token": None, "image_token": "<unk>",
                    "additional_special_tokens": ["</s>"], "extra_special_tokens": {"video_token": "</s>"}})
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_folder(folder)


def test_a_template_of_the_processor_alone(folder):
    """Older multimodal folders have the template in chat_template.json. Other places of it take precedence."""
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "a"}))
    assert from_folder(folder).chat_template == "a"
    settings(folder, {"chat_template": "b"})
    assert from_folder(folder).chat_template == "b"
    (folder / "chat_template.jinja").write_text("c")
    assert from_folder(folder).chat_template == "c"
