"""Text to token ids and back, with the tokenizer of a model folder if it has one. Knows no requests, no model."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, cast

from afd_megatron.errors import AfdError, CheckpointError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_EOS_FILES = ("config.json", "generation_config.json")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # ends a text whose last token is only a part of a character


class Tokenizer(Protocol):
    """What we use of a transformers tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool, return_dict: bool
    ) -> list[int]: ...


class TextCodec:
    """The tokenizer of a model folder, loaded when it is first needed.

    A folder without one works for token ids: `decode` gives None, and text is refused.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a request: those of config.json, of generation_config.json and of the tokenizer."""
        ids = {token_id for name in _EOS_FILES for token_id in _read_eos(self._folder / name)}
        if self.has_tokenizer and self._tokenizer.eos_token_id is not None:
            ids.add(self._tokenizer.eos_token_id)
        return frozenset(ids)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            AfdError: the folder has no tokenizer.
        """
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            AfdError: no tokenizer, no chat template, or messages that the template refuses.
        """
        from jinja2 import TemplateError

        tokenizer = self._tokenizer
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except (TemplateError, ValueError, TypeError) as error:
            raise AfdError(f"messages: {_first_line(error)}") from error

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Return the text without special tokens, or None without a tokenizer."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True) if self.has_tokenizer else None

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if not self.has_tokenizer:
            raise AfdError(f"{self._folder}: has no tokenizer (allowed: prompt_token_ids, without stop strings)")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{self._folder}: tokenizer cannot be read: {_first_line(error)}") from error
        return cast(Tokenizer, tokenizer)


class TextStream:
    """The text of a growing list of token ids, at constant cost per token. Holds back incomplete characters."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._token_ids: list[int] = []
        self._context_start = 0  # decoding starts here, as a token's text may depend on the ones before it
        self._context_end = 0  # the text up to here has been given out
        self.text = ""

    def push(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        context = self._codec.decode(self._token_ids[self._context_start : self._context_end])
        text = self._codec.decode(self._token_ids[self._context_start :])
        assert context is not None and text is not None, "a stream wants a tokenizer"
        if len(text) > len(context) and not text.endswith(_REPLACEMENT):
            self.text += text[len(context) :]
            self._context_start, self._context_end = self._context_end, len(self._token_ids)


def _read_eos(path: Path) -> list[int]:
    if not path.is_file():
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: is no JSON object: {_first_line(error)}") from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise CheckpointError(f"{path}: eos_token_id: {value!r} (allowed: an integer or a list of integers)")
    return ids


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
