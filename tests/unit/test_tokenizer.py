"""Loading a model directory: tokenizer, templates, ends of text; and the two encoders."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import sys
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import smg
from smg.errors import InvalidRequest
from smg.http.templates import TemplateError
from smg.http.tokenizer import ModelError, ModelTokenizer, load, reference_encoder

DEMO = Path(smg.__file__).parent / "data" / "demo-model"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def demo() -> ModelTokenizer:
    return load(str(DEMO))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A copy of the demo model to be changed."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))


# The shipped model


def test_the_shipped_model_is_small_and_complete(demo: ModelTokenizer) -> None:
    assert (DEMO / "tokenizer.json").stat().st_size < 600_000
    assert demo.vocab_size == len(demo.table) == 8192
    assert demo.table.exact
    assert demo.context == 32768
    assert [demo.decode([token], skip_special_tokens=False) for token in demo.end_ids] == [
        "<|im_end|>",
        "<|end_of_text|>",
    ]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_shipped_tokenizer(text: str) -> None:
    model = SHIPPED
    assert model.decode(model.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


SHIPPED = load(str(DEMO))


def test_the_shipped_tokenizer_honours_special_tokens(demo: ModelTokenizer) -> None:
    [start] = demo.encode("<|im_start|>", add_special_tokens=False)
    assert demo.table.is_special(start)
    [call] = demo.encode("<tool_call>", add_special_tokens=False)
    assert not demo.table.is_special(call)
    [begin] = demo.encode("<|begin_of_text|>", add_special_tokens=False)
    assert demo.encode("hi", add_special_tokens=True) == [begin, *demo.encode("hi", add_special_tokens=False)]


def test_the_shipped_template(demo: ModelTokenizer) -> None:
    system = {"role": "system", "content": "Be brief."}
    start = "<|begin_of_text|><|im_start|>"
    assert demo.render_chat([system, *USER]) == (
        f"{start}system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = demo.render_chat([system, *USER, said], tools=[{"type": "function"}], add_generation_prompt=False)
    assert text.count("Be brief.") == 1
    assert '{"type": "function"}\n' in text
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call><|im_end|>\n'
    )
    with pytest.raises(TemplateError, match="Unknown role: poet"):
        demo.render_chat([{"role": "poet", "content": "o"}])


def test_the_script_makes_the_same_tokenizer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(smg.__file__).parent.parent / "scripts" / "make_demo_tokenizer.py"
    spec = importlib.util.spec_from_file_location("make_demo_tokenizer", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"] == module.CHAT_TEMPLATE
    # A part of the text it trains with: all of it takes a quarter of a minute.
    monkeypatch.setattr(module, "training_text", lambda: iter(module.SENTENCES * 10))
    made = module.train()
    assert made.to_str() == module.train().to_str()
    assert [made.id_to_token(made.get_vocab_size() - 7 + i) for i in range(7)] == [
        SHIPPED.tokenizer.id_to_token(8185 + i) for i in range(7)
    ]


# What is read


def test_end_ids_come_from_all_files_primary_first(model_dir: Path) -> None:
    change(model_dir / "config.json", lambda c: c.update(eos_token_id=7))
    change(model_dir / "generation_config.json", lambda c: c.update(eos_token_id=[9, 7]))
    assert list(load(str(model_dir)).end_ids.items()) == [(7, None), (9, None), (8188, None)]
    (model_dir / "generation_config.json").unlink()
    change(model_dir / "config.json", lambda c: (c.pop("eos_token_id"), c.update(text_config={"eos_token_id": 5})))
    assert list(load(str(model_dir)).end_ids) == [5, 8188]


def test_only_tokenizer_json_must_be_there(model_dir: Path) -> None:
    for file in model_dir.iterdir():
        if file.name != "tokenizer.json":
            file.unlink()
    model = load(str(model_dir))
    assert (model.end_ids, model.context, model.vocab_size) == ({}, None, 8192)
    with pytest.raises(TemplateError, match="--chat-template"):
        model.render_chat(USER)


def test_vocabulary_and_context_are_the_models_own(model_dir: Path) -> None:
    change(model_dir / "config.json", lambda c: (c.clear(), c.update(vocab_size=8320, n_positions=1024)))
    model = load(str(model_dir))
    assert (model.vocab_size, len(model.table), model.context) == (8320, 8192, 1024)
    change(model_dir / "config.json", lambda c: c.update(text_config={"vocab_size": 9000, "n_positions": 55}))
    model = load(str(model_dir))
    assert (model.vocab_size, model.context) == (9000, 55)


def test_the_tokenizer_may_be_elsewhere(model_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "tokenizer"
    elsewhere.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model_dir / name).rename(elsewhere / name)
    for path in (elsewhere, elsewhere / "tokenizer.json"):
        model = load(str(model_dir), str(path))
        assert model.name == str(model_dir)
        assert "<|im_start|>" in model.render_chat(USER)


def test_truncation_and_padding_of_training_are_undone(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    model = load(str(model_dir))
    text = "one two three four five six seven"
    assert model.decode(model.encode(text, add_special_tokens=True)) == text


def test_special_tokens_may_be_objects_or_lie_in_a_file_of_their_own(model_dir: Path) -> None:
    override = "{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}"
    change(model_dir / "tokenizer_config.json", lambda c: c.update(bos_token={"content": "<B>"}, eos_token=None))
    (model_dir / "special_tokens_map.json").write_text('{"bos_token": "no", "eos_token": {"content": "<E>"}}')
    assert load(str(model_dir), chat_template=override).render_chat(USER) == "<B>|<E>|False"


# Templates: which one


def test_a_template_file_beside_the_tokenizer_comes_first(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("file")
    assert load(str(model_dir)).render_chat(USER) == "file"


def test_a_template_in_json_comes_last(model_dir: Path) -> None:
    (model_dir / "chat_template.json").write_text('{"chat_template": "json"}')
    assert load(str(model_dir)).render_chat(USER) != "json"
    change(model_dir / "tokenizer_config.json", lambda c: c.pop("chat_template"))
    assert load(str(model_dir)).render_chat(USER) == "json"


def test_named_templates(model_dir: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    change(model_dir / "tokenizer_config.json", lambda c: c.update(chat_template=named))
    model = load(str(model_dir))
    assert model.render_chat(USER) == "plain"
    assert model.render_chat(USER, tools=[]) == "plain"
    assert model.render_chat(USER, tools=[{"type": "function"}]) == "tools"
    change(model_dir / "tokenizer_config.json", lambda c: c.update(chat_template=named[:1]))
    assert load(str(model_dir)).render_chat(USER) == "tools"


def test_an_override_is_a_file_or_the_text(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own {{ messages[0].content }}")
    assert load(str(model_dir), chat_template=str(tmp_path / "own.jinja")).render_chat(USER) == "own hi"
    assert load(str(model_dir), chat_template="{{ messages | length }}").render_chat(USER) == "1"


# Errors name the file


def test_what_cannot_be_loaded_is_named(model_dir: Path, tmp_path: Path) -> None:
    def refused(pattern: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ModelError, match=pattern):
            load(*(args or (str(model_dir),)), **options)

    refused("someone/model.*is not a directory", "someone/model")
    refused(r"tokenizer\.json is missing", str(tmp_path))
    refused("nowhere is missing", str(model_dir), str(tmp_path / "nowhere"))
    refused(r"own\.jinja", chat_template=str(tmp_path / "own.jinja"))
    refused("chat template, line 2", chat_template="{{ 1 }}\n{% if %}")
    (model_dir / "config.json").write_text('{"eos_token_id": "x"}')
    refused("eos_token_id.*'x'")
    (model_dir / "config.json").write_text("[]")
    refused(r"config\.json must hold a JSON object")
    (model_dir / "config.json").write_text("{")
    refused(r"config\.json is not valid JSON")
    (model_dir / "config.json").unlink()
    change(model_dir / "tokenizer_config.json", lambda c: c.update(chat_template=[{"name": "x", "template": 5}]))
    refused("chat_template must be a string")
    (model_dir / "tokenizer.json").write_text("{}")
    refused(r"tokenizer\.json is not a tokenizer")


def test_a_lone_surrogate_is_refused(demo: ModelTokenizer) -> None:
    for model in (demo, ModelTokenizer("reference", demo.tokenizer)):
        with pytest.raises(InvalidRequest, match="surrogate"):
            model.encode("a\ud800", add_special_tokens=False)


# The faster encoder


def test_the_encoder_agrees_with_the_reference(demo: ModelTokenizer) -> None:
    reference = reference_encoder(demo.tokenizer)
    chosen = random.Random(1)
    for _ in range(100):
        text = demo.decode([chosen.randrange(8192) for _ in range(30)], skip_special_tokens=False)
        for special in (False, True):
            assert demo.encode(text, special) == reference(text, special)


def fake(monkeypatch: pytest.MonkeyPatch, encode: Callable[[list[int]], list[int]]) -> None:
    """`fastokens` that does to the right ids what `encode` does."""

    def from_file(path: str) -> Any:
        right = reference_encoder(Tokenizer.from_file(path))

        def ids(text: str, special: bool) -> list[int]:
            return encode(list(right(text, special)))

        return SimpleNamespace(
            encode=lambda text, special: SimpleNamespace(ids=ids(text, special)),
            encode_batch_flat=lambda texts, special: (array("I", ids(texts[0], special)).tobytes(), b""),
        )

    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_file=from_file)))


def test_ids_of_a_long_text_are_an_array(demo: ModelTokenizer) -> None:
    text = "A text <|im_start|> of some length: 日本語. " * 1000
    for model in (demo, ModelTokenizer("reference", demo.tokenizer)):
        for special in (False, True):
            ids = model.encode(text, special)
            assert isinstance(ids, array)
            assert list(ids) == demo.tokenizer.encode(text, add_special_tokens=special).ids


def test_a_faster_tokenizer_is_used_when_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fake(monkeypatch, lambda ids: calls.append(ids) or ids)
    model = load(str(DEMO))
    before = len(calls)
    assert before > 50
    model.encode("hello", add_special_tokens=False)
    assert len(calls) == before + 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ids: ids[:-1],
        lambda ids: [token for token in ids if token != 8190],  # an added token
        lambda ids: ids[1:] if ids[:1] == [8185] else ids,  # the begin of text, where it is asked for
    ],
)
def test_a_faster_tokenizer_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, demo: ModelTokenizer, wrong: Callable[[list[int]], list[int]]
) -> None:
    fake(monkeypatch, wrong)
    model = load(str(DEMO))
    text = "hello <tool_call> world"
    assert model.encode(text, True) == reference_encoder(demo.tokenizer)(text, True)


def test_a_faster_tokenizer_that_refuses_the_model_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ids: list[int]) -> list[int]:
        raise ValueError("Metaspace")

    fake(monkeypatch, refuse)
    assert load(str(DEMO)).encode("hello", add_special_tokens=False)


def test_without_a_faster_tokenizer(monkeypatch: pytest.MonkeyPatch, demo: ModelTokenizer) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    text = "Hello <|im_start|> world"
    assert load(str(DEMO)).encode(text, add_special_tokens=True) == demo.encode(text, add_special_tokens=True)


def test_threads_may_share_a_tokenizer(demo: ModelTokenizer) -> None:
    texts = [f"text number {i} " * 20 for i in range(40)]
    wanted = [demo.encode(text, False) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: demo.encode(text, False), texts * 3)) == wanted * 3
