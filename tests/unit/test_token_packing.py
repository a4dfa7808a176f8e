"""Prompts as msgpack arrays: what a list gives, an array of unsigned integers gives too."""

from array import array

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg._codec import pack_token_ids
from smg.errors import InvalidRequest

EDGES = [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1]
IDS = st.lists(st.sampled_from(EDGES) | st.integers(0, 2**32 - 1), max_size=40)


@given(IDS)
def test_ids_are_packed_as_msgpack_packs_them(ids: list[int]) -> None:
    assert pack_token_ids(ids) == pack_token_ids(array("I", ids)) == msgpack.packb(ids)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65535, 65536])
def test_every_size_has_its_head(count: int) -> None:
    ids = [7] * count
    assert pack_token_ids(ids) == pack_token_ids(array("I", ids)) == msgpack.packb(ids)


@given(IDS, st.integers(0, 2**32))
def test_an_id_out_of_bounds_is_named_whatever_the_ids_are_in(ids: list[int], below: int) -> None:
    wrong = next((i for i, value in enumerate(ids) if value >= below), None)
    for given_ids in (ids, array("I", ids)):
        if wrong is None:
            assert pack_token_ids(given_ids, below) == msgpack.packb(ids)
        else:
            with pytest.raises(InvalidRequest, match=rf"element {wrong} is not"):
                pack_token_ids(given_ids, below)
