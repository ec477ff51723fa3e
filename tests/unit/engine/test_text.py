import json
from pathlib import Path

import pytest

from afd_megatron.engine.text import TextCodec, TextStream
from afd_megatron.errors import AfdError, CheckpointError

TEXT = "naïve 漢字 🙂 end"


def test_decode_gives_back_the_encoded_text(byte_codec: TextCodec) -> None:
    assert byte_codec.decode(byte_codec.encode(TEXT)) == TEXT


def test_decode_leaves_special_tokens_out(byte_codec: TextCodec) -> None:
    assert byte_codec.decode([*byte_codec.encode("ab"), 0]) == "ab"


def test_stream_ends_with_the_text_of_all_tokens_and_never_shows_part_of_a_character(byte_codec: TextCodec) -> None:
    stream = TextStream(byte_codec)
    for token_id in byte_codec.encode(TEXT):
        stream.push(token_id)
        assert TEXT.startswith(stream.text)
    assert stream.text == TEXT


def test_messages_go_through_the_chat_template(byte_codec: TextCodec) -> None:
    token_ids = byte_codec.encode_chat([{"role": "user", "content": "hi"}])
    assert byte_codec.decode(token_ids) == "[user]hi[assistant]"


def test_messages_that_the_template_refuses_are_an_error(byte_codec: TextCodec) -> None:
    with pytest.raises(AfdError, match="messages: role robot is unknown"):
        byte_codec.encode_chat([{"role": "robot", "content": "hi"}])


def test_eos_ids_are_the_union_of_both_configs(bare_codec: TextCodec) -> None:
    assert bare_codec.eos_token_ids == {1, 2}


def test_eos_ids_hold_the_one_of_the_tokenizer(byte_folder: Path) -> None:
    (byte_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert TextCodec(byte_folder).eos_token_ids == {0, 7, 8}


@pytest.mark.parametrize("value", ["2", [1, "2"], 1.5, True])
def test_an_eos_id_that_is_no_integer_is_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"eos_token_id: .* an integer or a list"):
        _ = TextCodec(tmp_path).eos_token_ids


def test_a_folder_without_tokenizer_has_no_text_and_refuses_it(bare_codec: TextCodec) -> None:
    assert not bare_codec.has_tokenizer
    assert bare_codec.decode([3, 4]) is None
    for refused in (lambda: bare_codec.encode("a"), lambda: bare_codec.encode_chat([])):
        with pytest.raises(AfdError, match="has no tokenizer"):
            refused()


def test_a_broken_tokenizer_is_told_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    with pytest.raises(CheckpointError, match=f"{tmp_path}: tokenizer cannot be read"):
        TextCodec(tmp_path).encode("a")
