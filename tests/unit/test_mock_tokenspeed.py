"""The simulator's TokenSpeed dialect: bytes as the engine's encoders make them, requests as it reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg.mock.dialect import Taken, Undecodable
from smg.mock.model import Batch, Engine, Load
from smg.mock.replies import make_replies
from smg.mock.settings import Settings
from smg.mock.tokenspeed import COLUMNS, SAMPLING, TokenSpeed, decode_add, normalize
from smg.protocol import handshake

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "tokenspeed.json").read_text())
REPLIES = make_replies(Settings(vocab_size=1000))
ADD, ABORT = b"\x00", b"\x01"


def vectors(*kinds: str) -> list[Any]:
    return [
        pytest.param(v, id=v["name"]) for v in VECTORS if v["kind"] in kinds and not v["name"].startswith("synthetic")
    ]


def dialect_of(**options: Any) -> tuple[TokenSpeed, Engine]:
    settings = Settings(**{"vocab_size": 1000, **options})
    engine = Engine(settings, REPLIES, TokenSpeed.ending)
    return TokenSpeed(settings, engine, settings.vocab_size), engine


def add_frames(rid: Any = "a", prompt: Any = (1, 2, 3), sampling: Any = None, **tail: Any) -> list[bytes]:
    """An ADD of 11 elements; sampling parameters by name."""
    params = {field.name: field.default for field in SAMPLING} | (sampling or {})
    fields = {
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": True,
        **tail,
    }
    prompt = list(prompt) if isinstance(prompt, tuple) else prompt
    elements = ["TokenizedGenerateReqInput", rid, None, None, prompt, list(params.values()), *fields.values()]
    return [ADD, msgpack.packb(elements)]


def taken(frames: list[bytes], **options: Any) -> Taken:
    return dialect_of(**options)[0].take(frames, 0.0)


# Output


@pytest.mark.parametrize("vector", vectors("slim_9", "slim_10", "slim_14"))
def test_output_frames_equal_the_engines_own_bytes_for_the_same_values(vector: dict[str, Any]) -> None:
    elements = msgpack.unpackb(bytes.fromhex(vector["hex"]))[1:]
    load = Load(*elements[9:13]) if len(elements) == 13 else Load(0, 0, 0, 0)
    batch = Batch(*elements[:8], load=load)
    dialect, _ = dialect_of(slim_elements=1 + len(elements))
    index = elements[8] if len(elements) > 8 else 0
    assert dialect.encode(batch, index) == [bytes.fromhex(vector["hex"])]


@pytest.mark.parametrize("kind", ["garbage", "empty", "truncated", "trailing"])
def test_spoiled_bytes_are_no_msgpack_value(kind: str) -> None:
    (frame,) = spoiled(kind)
    with pytest.raises(ValueError):
        msgpack.unpackb(frame)


def spoiled(kind: str, column: str = "") -> list[bytes]:
    batch = Batch(["a", "b"], [[1], [2]], ["", ""], [3, 3], [1, 1], [0, 0], [[], []], [[], []], Load(2, 0, 2, 9))
    return dialect_of()[0].spoil(kind, batch, 0, column)


def test_spoiled_shapes_are_wrong_in_just_that_way() -> None:
    assert msgpack.unpackb(*spoiled("tag"))[0] != "BatchTokenIDOutSlim"
    assert len(msgpack.unpackb(*spoiled("short"))) == 8
    assert type(msgpack.unpackb(*spoiled("map"))) is dict
    for place, column in enumerate(COLUMNS):
        lengths = [len(part) for part in msgpack.unpackb(*spoiled("ragged", column))[1:9]]
        assert lengths == [2] * place + [1] + [2] * (7 - place)
    with pytest.raises(ValueError, match="kind"):
        spoiled("worse")
    with pytest.raises(ValueError, match="rids"):
        spoiled("ragged", "nope")


# Handshake


@pytest.mark.parametrize("vector", vectors("handshake_hello", "handshake_ready"))
def test_hello_and_ready_equal_the_engines_own_bytes(vector: dict[str, Any]) -> None:
    dialect, _ = dialect_of()
    said = dialect.hello() if vector["kind"] == "handshake_hello" else dialect.ready()
    assert said == bytes.fromhex(vector["hex"])


@pytest.mark.parametrize("vector", vectors("ready_response"))
def test_registrations_have_the_engines_keys_in_its_order(vector: dict[str, Any]) -> None:
    elements = 9 if "git57b49061" in vector["name"] else 14
    said = msgpack.unpackb(dialect_of(slim_elements=elements)[0].registration(3))
    assert list(said) == list(vector["decoded"])


def test_a_registration_tells_the_simulators_own_figures() -> None:
    dialect, _ = dialect_of(ranks=4, max_model_len=999, kv_pages=77, page_size=8, max_running=5)
    said = handshake.decode_registration(dialect.registration(3))
    assert said.family == "tokenspeed"
    assert (said.max_model_len, said.num_gpu_blocks, said.block_size, said.max_num_seqs) == (999, 77, 8, 5)
    assert (said.data_parallel_size, said.data_parallel_rank, said.kv_cache_size_tokens) == (4, 3, 616)


def test_a_registration_can_be_overlaid_and_keys_taken_out() -> None:
    dialect, _ = dialect_of(registration='{"vllm_version": "sglang-0.5.23", "dtype": null, "new": [1]}')
    said = msgpack.unpackb(dialect.registration(0))
    assert said["vllm_version"] == "sglang-0.5.23"
    assert "dtype" not in said
    assert said["new"] == [1]


# ADD


def engine_view(vector: dict[str, Any]) -> list[Any]:
    return vector.get("engine_view", [vector["decoded"]])[0]


@pytest.mark.parametrize("vector", [v for v in vectors("request_add") if "_mm_" not in v.id])  # no JSON form
def test_every_captured_request_is_read_as_the_engine_reads_it(vector: dict[str, Any]) -> None:
    request = decode_add(bytes.fromhex(vector["hex"]))
    normalize(request["sampling_params"], request["rid"])
    seen = engine_view(vector)
    assert list(request.values())[:4] == seen[1:5]
    assert list(request.values())[5:22] == seen[6:23]
    sampling, wanted = list(request["sampling_params"].values()), seen[5]
    sampling[2], wanted[2] = sorted(sampling[2] or []), sorted(wanted[2] or [])
    if request["sampling_params"]["top_k"] == 1 and "0.1.1" not in vector["name"]:
        sampling[23] = wanted[23]  # older engines drew a greedy request's seed from its id
    # stop_strs, its length and is_normalized are the engine's bookkeeping for stop strings.
    assert sampling[:26] == wanted[:26]


@pytest.mark.parametrize("vector", vectors("request_add"))
def test_captured_requests_are_taken_whatever_their_length(vector: dict[str, Any]) -> None:
    frames = [ADD, bytes.fromhex(vector["hex"]), *map(bytes.fromhex, vector.get("aux_hex", []))]
    dialect, engine = dialect_of(vocab_size=200_000, grammar_backend=True)
    what = dialect.take(frames, 0.0)
    if what.request["sampling_params"]["n"] == 2:
        assert what.outcome == "rejected"
    elif what.outcome == "rejected":
        assert "range" in what.reason or "exclude" in what.reason or "logprobs" in what.reason
    else:
        assert what.rids[0] in engine
    assert what.request.get("aux_bytes", []) == [len(frame) for frame in frames[2:]]


def test_elements_beyond_those_known_are_skipped() -> None:
    known = [None, None, None, False, 0.0, *[None] * 9]
    payload = msgpack.unpackb(add_frames()[1]) + known + ["new", {"k": [1]}]
    payload[5] += [1, "new"]
    dialect, engine = dialect_of()
    assert dialect.take([ADD, msgpack.packb(payload)], 0.0).outcome == "queued"
    assert "a" in engine


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [ADD],
        [b"", b""],
        [b"\x02", b"\x90"],
        [ADD, b""],
        [ADD, b"\xc1"],
        [ADD, add_frames()[1][:-1]],
        [ADD, add_frames()[1] + b"\xc0"],
        [ADD, msgpack.packb({"rid": "a"})],
        [ADD, msgpack.packb(["TokenizedGenerateReqInput", "a", None, None, [1]])],
        [ADD, msgpack.packb(["Other", "a", None, None, [1], []])],
        add_frames(rid=None),
        add_frames(rid=["a"]),
        add_frames(rid=7),
        add_frames(prompt=None),
        add_frames(prompt=[1, 2.0]),
        add_frames(prompt=[True]),
        add_frames(prompt="abc"),
        add_frames(stream=1),
        add_frames(stream=None),
        add_frames(sampling={"temperature": "1"}),
        add_frames(sampling={"temperature": None}),
        add_frames(sampling={"temperature": True}),
        add_frames(sampling={"max_new_tokens": 5.0}),
        add_frames(sampling={"ignore_eos": 0}),
        add_frames(sampling={"logit_bias": {5: 1.0}}),
        add_frames(sampling={"stop_token_ids": [1, "2"]}),
        [ABORT, msgpack.packb("a")],
        [ABORT, msgpack.packb(["a", 1])],
        [ABORT, msgpack.packb([b"a"])],
    ],
)
def test_what_the_typed_decoder_refuses_is_undecodable_and_changes_nothing(frames: list[bytes]) -> None:
    dialect, engine = dialect_of()
    with pytest.raises(Undecodable):
        dialect.take(frames, 0.0)
    assert engine.due is None


@given(st.binary(max_size=60))
def test_no_payload_does_more_than_be_undecodable(payload: bytes) -> None:
    dialect, _ = dialect_of()
    for kind in (ADD, ABORT):
        try:
            dialect.take([kind, payload], 0.0)
        except Undecodable:
            pass


REFUSED = {
    "top_p": [0.0, 1.01, float("nan")],
    "top_k": [0, -2, 128, 5000],
    "min_p": [-0.1, 1.1],
    "frequency_penalty": [-2.1, 2.1],
    "presence_penalty": [-2.1, 2.1],
    "repetition_penalty": [-0.1, 2.1],
    "min_new_tokens": [-1, 17],
    "max_new_tokens": [-1],
    "logprobs": [1, -1],
    "n": [0, 2],
    "logit_bias": [{"1000": 1.0}, {"-1": 1.0}, {"x": 1.0}],
    "json_schema": ["{}"],
    "structural_tag": ["{}"],
}
ACCEPTED = {
    "temperature": [0, 1e-9, 5.0, -0.1],  # below 1e-6 all is greedy
    "top_p": [1e-9, 1],
    "top_k": [-1, 1, 127, 1 << 30],
    "min_p": [0, 1],
    "frequency_penalty": [-2, 2],
    "presence_penalty": [-2, 2],
    "repetition_penalty": [0, 2],
    "min_new_tokens": [0, 16],
    "max_new_tokens": [None, 0],
    "logprobs": [0],
    "logit_bias": [{"999": -100}, {}],
}


def pairs(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), pairs(REFUSED))
def test_a_value_the_engine_refuses_gets_a_terminal_abort_at_once(name: str, value: Any) -> None:
    dialect, engine = dialect_of()
    what = dialect.take(add_frames(prompt=(1, 2, 3), sampling={"max_new_tokens": 16, name: value}), 0.0)
    assert what.outcome == "rejected"
    assert name in what.reason or "grammar" in what.reason
    assert what.answer is not None
    assert msgpack.unpackb(*dialect.encode(what.answer, 0)) == [
        "BatchTokenIDOutSlim", ["a"], [[]], ["abort"], [3], [0], [0], [[]], [[]], 0, 0, 0, 0, 20480
    ]  # fmt: skip
    assert engine.due is None


@pytest.mark.parametrize(("name", "value"), pairs(ACCEPTED))
def test_a_value_the_engine_takes_is_queued(name: str, value: Any) -> None:
    assert taken(add_frames(sampling={"max_new_tokens": 16, name: value})).outcome == "queued"


def test_constraints_need_a_grammar_backend_and_exclude_each_other() -> None:
    one, two = {"regex": "a+"}, {"regex": "a+", "ebnf": "root ::= x"}
    assert taken(add_frames(sampling=one), grammar_backend=True).outcome == "queued"
    assert "exclude" in taken(add_frames(sampling=two), grammar_backend=True).reason


def test_logprobs_are_gated_as_in_the_engine() -> None:
    assert "--enable-output-logprobs" in taken(add_frames(return_logprob=True)).reason
    serving = {"enable_output_logprobs": True}
    for tail, outcome in (
        ({}, "queued"),
        ({"logprob_start_len": 2}, "queued"),  # the last prompt token: no prompt logprobs are asked for
        ({"logprob_start_len": 1}, "rejected"),
        ({"logprob_start_len": 3}, "rejected"),
        ({"logprob_start_len": -2}, "rejected"),
        ({"top_logprobs_num": 1}, "rejected"),
        ({"token_ids_logprob": [4]}, "rejected"),
        ({"token_ids_logprob": []}, "queued"),
    ):
        assert taken(add_frames(return_logprob=True, **tail), **serving).outcome == outcome, tail
    # Without return_logprob none of them is looked at.
    assert taken(add_frames(top_logprobs_num=5, logprob_start_len=0)).outcome == "queued"


def test_a_prompt_beyond_the_kv_cache_is_refused() -> None:
    what = taken(add_frames(prompt=tuple(range(100))), kv_pages=4, page_size=16)
    assert what.outcome == "rejected"


def test_greedy_requests_have_the_seed_0_and_others_without_one_take_it_from_their_id() -> None:
    assert taken(add_frames(sampling={"temperature": 0.0, "seed": 9})).request["sampling_params"]["seed"] == 0
    assert taken(add_frames(sampling={"top_k": 1})).request["sampling_params"]["seed"] == 0
    assert taken(add_frames(sampling={"seed": 9})).request["sampling_params"]["seed"] == 9
    assert taken(add_frames(rid="req-1")).request["sampling_params"]["seed"] == 1829706545
    assert (
        taken(add_frames(sampling={"seed": 9, "top_k": 1, "is_normalized": True})).request["sampling_params"]["seed"]
        == 9
    )


# ABORT


def abort_frames(*rids: str) -> list[bytes]:
    return [ABORT, msgpack.packb(list(rids))]


def test_an_abort_drops_its_requests_silently_and_leaves_the_others() -> None:
    dialect, engine = dialect_of()
    for rid in "abc":
        dialect.take(add_frames(rid), 0.0)
    what = dialect.take(abort_frames("a", "c"), 1.0)
    assert (what.rids, what.answer) == (["a", "c"], None)
    assert [rid in engine for rid in "abc"] == [False, True, False]
    assert dialect.take(add_frames("a"), 2.0).outcome == "queued"  # an abort that found its request leaves no mark


def test_an_abort_of_an_unknown_id_kills_one_later_add_of_that_id_within_300_seconds() -> None:
    dialect, engine = dialect_of()
    dialect.take(abort_frames("a", "b", "c"), 0.0)
    what = dialect.take(add_frames("a"), 299.0)
    assert (what.outcome, what.answer) == ("killed", None)
    assert "a" not in engine
    assert dialect.take(add_frames("a"), 299.0).outcome == "queued"
    assert dialect.take(add_frames("b"), 301.0).outcome == "queued"
    assert dialect.take(add_frames("a-longer"), 301.0).outcome == "queued"


def test_a_second_abort_of_an_unknown_id_renews_its_mark() -> None:
    dialect, _ = dialect_of()
    dialect.take(abort_frames("a", "b"), 0.0)
    dialect.take(abort_frames("a"), 200.0)
    assert dialect.take(add_frames("b"), 400.0).outcome == "queued"
    assert dialect.take(add_frames("a"), 400.0).outcome == "killed"


def test_an_invalid_request_is_answered_even_when_its_id_was_aborted_before() -> None:
    dialect, _ = dialect_of()
    dialect.take(abort_frames("a"), 0.0)
    assert dialect.take(add_frames("a", sampling={"n": 2}), 1.0).outcome == "rejected"
    assert dialect.take(add_frames("a"), 2.0).outcome == "queued"


def test_a_duplicate_id_is_not_guarded_against_but_told() -> None:
    dialect, _ = dialect_of()
    assert not dialect.take(add_frames("a"), 0.0).duplicate
    what = dialect.take(add_frames("a"), 0.0)
    assert (what.outcome, what.duplicate) == ("queued", True)


# What the wire asks of the engine


def rows_of(frames: list[bytes], **options: Any) -> list[tuple[Any, ...]]:
    """(completion tokens, token ids, reason, logprobs, their ids) of each row of one request."""
    dialect, engine = dialect_of(**options)
    assert dialect.take(frames, 0.0).outcome == "queued"
    rows = []
    while engine.due is not None:
        batch = engine.step(engine.due)
        if batch is not None:
            wire = msgpack.unpackb(*dialect.encode(batch, 0))
            rows.append((wire[5][0], wire[2][0], wire[3][0], wire[7][0], wire[8][0]))
    return rows


def test_streaming_requests_have_a_row_per_step_and_others_at_1_each_50_and_the_end() -> None:
    def lengths(**tail: Any) -> list[int]:
        limit = {"max_new_tokens": 104, "stream_interval": tail.pop("stream_interval", None)}
        return [row[0] for row in rows_of(add_frames(sampling=limit, **tail))]

    assert lengths(stream=True) == list(range(1, 105))
    assert lengths(stream=False) == [1, 50, 100, 104]
    assert lengths(stream=True, stream_interval=40) == [1, 41, 81, 104]
    assert lengths(stream=True, stream_interval=1) == list(range(1, 105))
    assert lengths(stream=False, stream_interval=40) == [1, 50, 100, 104]


def test_replies_follow_from_the_engines_and_the_requests_seed() -> None:
    def reply(**sampling: Any) -> list[int]:
        rows = rows_of(add_frames(sampling={"max_new_tokens": 12, **sampling}))
        return [token for row in rows for token in row[1]]

    assert reply(seed=7) == REPLIES.window(REPLIES.start(7), 0, 12)
    assert reply(seed=7) != reply(seed=8)
    assert reply(temperature=0.0) == REPLIES.window(REPLIES.start(0), 0, 12)


def test_logprobs_come_with_each_new_token_when_asked_for() -> None:
    frames = add_frames(sampling={"max_new_tokens": 3, "seed": 7}, return_logprob=True)
    rows = rows_of(frames, enable_output_logprobs=True)
    assert [row[4] for row in rows] == [row[1] for row in rows]
    assert [row[3][0] for row in rows] == REPLIES.logprob_window(REPLIES.start(7), 0, 3)


def test_stop_ids_work_through_the_wire_unless_eos_is_ignored() -> None:
    stop = REPLIES.window(REPLIES.start(7), 4, 5)
    sampling = {"seed": 7, "max_new_tokens": 9, "stop_token_ids": stop}
    assert [row[2] for row in rows_of(add_frames(sampling=sampling))] == [""] * 4 + ["stop"]
    sampling["ignore_eos"] = True
    assert rows_of(add_frames(sampling=sampling))[-1][:3:2] == (9, "length")
