from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import processors

from kvferry.config import KvDType
from kvferry.errors import ConfigError, InvalidInput
from router.chat_template import ChatTemplate
from router.model_card import ModelCard, read_model_card
from router.request import ChatMessage
from router.tokenizer import Tokenizer, load_tokenizer
from tests.support.router_model import CHAT_TEMPLATE, byte_tokenizer, write_model

if TYPE_CHECKING:
    from pathlib import Path

TURNS = (ChatMessage("system", "be"), ChatMessage("user", "hi"))


def rendered(source: str, *turns: ChatMessage) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(turns)


def with_bos() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    return Tokenizer(tokenizer, ChatTemplate(CHAT_TEMPLATE, {}))


def test_a_text_prompt_gets_the_tokenizers_special_tokens() -> None:
    assert with_bos().encode("a").tolist()[0] == 256


def test_a_conversation_gets_only_those_of_its_template() -> None:
    ids = with_bos().encode_chat(TURNS).tolist()
    assert ids[0] == 256
    assert ids.count(256) == 3
    assert ids.count(257) == 2


def test_ids_are_int32() -> None:
    assert with_bos().encode("a").dtype == "int32"


def test_half_a_surrogate_pair_is_no_text() -> None:
    tokenizer = with_bos()
    with pytest.raises(InvalidInput, match=r"^text: .*surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InvalidInput, match=r"^chat: .*surrogate"):
        tokenizer.encode_chat((ChatMessage("user", "a\ud800"),))


def test_a_conversation_that_goes_on_tokenizes_only_what_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), ChatTemplate(CHAT_TEMPLATE, {}))
    turns = tuple(ChatMessage("user", f"{number} " + "x" * 600) for number in range(4))
    before = tokenizer.encode_chat(turns[:3]).tolist()
    encoded: list[str] = []
    encode = tokenizer._encode

    def counting(field: str, text: str, **options: bool) -> object:
        encoded.append(text)
        return encode(field, text, **options)

    monkeypatch.setattr(tokenizer, "_encode", counting)
    after = tokenizer.encode_chat(turns).tolist()
    assert after[: len(before) - len("assistant: ")] == before[: -len("assistant: ")]
    assert "".join(encoded) == f"<s>user: {turns[3].content}</s>"


def test_a_text_with_too_many_tokens_is_not_tokenized_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), ChatTemplate(CHAT_TEMPLATE, {}))
    encoded: list[str] = []
    encode = tokenizer._encode

    def counting(field: str, text: str, **options: bool) -> object:
        encoded.append(text)
        return encode(field, text, **options)

    monkeypatch.setattr(tokenizer, "_encode", counting)
    turns = tuple(ChatMessage("user", f"{number} " + "x" * 600) for number in range(9))
    with pytest.raises(
        InvalidInput, match=r"^chat: has 1\d{3} tokens or more; the context of 1000"
    ):
        tokenizer.encode_chat(turns, tokens_max=1000)
    assert len("".join(encoded)) < 1500
    assert tokenizer.encode("x" * 1000, tokens_max=1000).size == 1000


def test_a_text_that_is_too_long_by_far_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for tokenizer in (with_bos(), Tokenizer(byte_tokenizer(), None)):
        monkeypatch.setattr(tokenizer, "_encode", None)
        with pytest.raises(InvalidInput, match=r"^text: has 1281 characters; at most 1280 for a"):
            tokenizer.encode("x" * 1281, tokens_max=10)


def test_a_long_word_has_the_ids_that_the_library_gives_it() -> None:
    """It is tokenized in another way, during which other threads can run."""
    text = "grüezi🚢" * 1000
    tokenizer = Tokenizer(byte_tokenizer(), None)
    assert tokenizer.encode(text).tolist() == byte_tokenizer().encode(text).ids
    with pytest.raises(InvalidInput, match=r"^text: .*surrogate"):
        tokenizer.encode(text + "\ud800")


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("a" * 20).size == 20
    assert loaded.encode("a").size == 1


def test_a_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("FILE")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(TURNS).tolist()) == "FILE"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    write_model(tmp_path)
    several = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(TURNS).tolist()) == "D"


def test_a_model_without_a_template_takes_no_conversation(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidInput, match=r"^chat:"):
        tokenizer.encode_chat(TURNS)


def test_a_broken_tokenizer_file_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .*does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.path: .*not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_template_sees_roles_texts_special_tokens_and_the_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n{{ m.role }}={{ m['content'] | tojson }};"
        "{% endfor %}\n{% if add_generation_prompt %}go{% endif %}"
    )
    assert rendered(source, ChatMessage("user", "<é>")) == '<s>user="<é>";go'


def test_a_template_may_refuse() -> None:
    with pytest.raises(InvalidInput, match=r"^chat\.messages: .*no tools"):
        rendered(CHAT_TEMPLATE, ChatMessage("tool", "x"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for m in messages %}{{ messages.append(m) }}{% endfor %}",
    ],
)
def test_a_template_is_locked_in(source: str) -> None:
    with pytest.raises(InvalidInput, match=r"^chat\.messages"):
        rendered(source, *TURNS)


def test_a_broken_template_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"model\.path: the chat template"):
        ChatTemplate("{% if %}", {})


def test_the_card_says_what_the_files_say(tmp_path: Path) -> None:
    write_model(tmp_path, context_length=512)
    card = read_model_card(tmp_path, KvDType.FLOAT16, 8192)
    assert card == ModelCard(
        vocab_size=264,
        context_length=512,
        eos_token_ids=(257,),
        kv_bytes_per_token=2 * 2 * 2 * 8 * 2,
    )


def test_the_configured_context_bounds_the_models(tmp_path: Path) -> None:
    write_model(tmp_path, context_length=512)
    assert read_model_card(tmp_path, KvDType.FLOAT32, 100).context_length == 100


def test_the_generation_configuration_goes_before_the_model_configuration(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    assert read_model_card(tmp_path, KvDType.FLOAT32, 100).eos_token_ids == (257, 258)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "not valid JSON"), ("[]", "JSON object"), ('{"num_attention_heads": 0}', "num_att")],
)
def test_a_broken_config_names_the_setting(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"model\.path: .*{problem}"):
        read_model_card(tmp_path, KvDType.FLOAT32, 100)
