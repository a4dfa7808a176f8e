"""Make smg/data/demo-model: a small tokenizer with a chat template for the demo and the tests.

    python scripts/make_demo_tokenizer.py [DIRECTORY]

Needs only CPython and `tokenizers`; nothing is downloaded. The same CPython and `tokenizers` release give the
same bytes. The committed files were made with CPython 3.11 and tokenizers 0.23.

The training text is the documentation inside every CPython installation (the language reference that `help()`
shows, and the docstrings and comments of the standard library), under the Python Software Foundation License,
which allows use, analysis and derivative works with no condition on data of this kind; and the sentences in
`SENTENCES`, which belong to this project. The result holds no text: only which byte sequences are frequent.

What comes out is shaped as current chat models' tokenizers are: byte-level BPE over UTF-8 without normalizer
(so any text survives a round trip), words split by the usual regular expression with digits in groups of
three, a beginning-of-text token added on request, ChatML-like turns, two added tokens that are not special.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 8192  # entries in all, added tokens included
CONTEXT = 32768  # tokens; what config.json promises

BOS, EOS, TURN, TURN_END, PAD = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
)
SPECIAL = [BOS, EOS, TURN, TURN_END, PAD]
PLAIN_ADDED = ["<tool_call>", "</tool_call>"]

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Enough of other scripts that their commonest characters become single tokens while most stay two or three,
# so that streams regularly end in the middle of a character.
SENTENCES = [
    "The router sends each request to the rank with the least work and streams the answer back.",
    "Every rank says hello once, is told its sockets, and from then on only tokens travel.",
    "A quick question: how many requests are running, and how many are waiting? I'm not sure, but we'll see.",
    "Der Router schickt jede Anfrage an den Rang mit der geringsten Last und überträgt die Antwort zurück.",
    "Le routeur envoie chaque requête au rang le moins chargé, puis renvoie la réponse au fur et à mesure.",
    "El encaminador envía cada petición al rango con menos trabajo y devuelve la respuesta según llega.",
    "Маршрутизатор отправляет каждый запрос наименее загруженному рангу и возвращает ответ по частям.",
    "Ο δρομολογητής στέλνει κάθε αίτημα στον λιγότερο φορτωμένο κόμβο.",
    "路由器把每个请求发给负载最小的节点，然后把回答一个词一个词地传回来。你好，世界！",
    "ルーターは各リクエストを最も空いているランクに送り、答えを少しずつ返します。こんにちは、世界。",
    "라우터는 각 요청을 가장 한가한 노드로 보내고 답을 조금씩 돌려줍니다. 안녕하세요, 세계!",
    "الموجّه يرسل كل طلب إلى أقل العقد حملاً ثم يعيد الإجابة.",
    "राउटर हर अनुरोध को सबसे कम व्यस्त नोड पर भेजता है।",
    "All done 🎉 thanks 🙏 that was fast 🚀 see you 👋 nice 😀 ok 👍 ✅ ❤️ → ← … – — “quoted” ‘so’ €5 °C ½ × ≤ ≥",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3}}',
]
REPEAT = 40

# Subscripts, since jinja2 tries an attribute first where a dot is written.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
        {%- set messages = messages[1:] %}
    {%- endif %}
    {{- 'Functions you may call, one JSON object per line:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\nTo call one, answer with <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ('user', 'assistant', 'system', 'tool', 'developer') %}
        {{- raise_exception('Unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
    {%- if 'tool_calls' in message and message['tool_calls'] %}
        {%- for call in message['tool_calls'] %}
            {{- '<tool_call>{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' }}
            {{- (call['function']['arguments'] | tojson) + '}</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "smg" / "data" / "demo-model"
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    write(target / "tokenizer.json", json.loads(tokenizer.to_str()), compact=True)
    write(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "bos_token": BOS,
            "eos_token": TURN_END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write(
        target / "config.json",
        {
            "architectures": ["DemoForCausalLM"],
            "model_type": "demo",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": CONTEXT,
            "bos_token_id": ids[BOS],
            "eos_token_id": [ids[TURN_END], ids[EOS]],
        },
    )
    write(
        target / "generation_config.json",
        {"bos_token_id": ids[BOS], "eos_token_id": [ids[TURN_END], ids[EOS]], "pad_token_id": ids[PAD]},
    )
    print(f"{target}: {tokenizer.get_vocab_size()} entries, {(target / 'tokenizer.json').stat().st_size} bytes")


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(PLAIN_ADDED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=3,
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in PLAIN_ADDED])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B:1",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
    return tokenizer


def training_text() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        if path.parent.name not in ("site-packages", "dist-packages", "test", "encodings", "pydoc_data"):
            yield from prose(path.read_text(encoding="utf-8", errors="replace"))
    for _ in range(REPEAT):
        yield from SENTENCES


def prose(source: str) -> Iterator[str]:
    """Docstrings and comments of one module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def write(path: Path, value: object, *, compact: bool = False) -> None:
    if compact:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    else:
        text = json.dumps(value, ensure_ascii=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
