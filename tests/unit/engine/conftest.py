"""A model folder without a tokenizer, and one whose tokens are bytes."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from afd_megatron.engine.text import TextCodec

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('role ' + message.role + ' is unknown') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
)


@pytest.fixture(scope="session")
def bare_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Token ids only; 1 and 2 end a request."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return TextCodec(folder)


@pytest.fixture(scope="session")
def byte_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Token id b + 1 is byte b of the alphabet, so a character may span tokens; 0 is the special `<eos>`."""
    folder = tmp_path_factory.mktemp("bytes")
    _write_byte_tokenizer(folder)
    return TextCodec(folder)


@pytest.fixture
def byte_folder(tmp_path: Path) -> Path:
    """The folder of `byte_codec`, to be changed."""
    _write_byte_tokenizer(tmp_path)
    return tmp_path


def _write_byte_tokenizer(folder: Path) -> None:
    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "eos_token_id": None}))
