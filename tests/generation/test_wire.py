"""Frames come out as they went in, however the stream cuts them; everything else is refused."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.generation import messages as m
from ridethrough.generation.wire import MAX_FRAME_BYTES, Decoder, WireError, encode

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=5)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(MESSAGES, st.data())
def test_any_cut_of_the_stream_gives_the_same_messages(sent: list[dict[str, object]], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in sent)
    decoder, got, at = Decoder(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        got += decoder.feed(stream[at : at + size])
        at += size
    assert got == sent


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=64))
def test_garbage_gives_messages_or_a_wire_error_and_nothing_else(garbage: bytes) -> None:
    try:
        assert all(isinstance(message, dict) for message in Decoder().feed(garbage))
    except WireError:
        pass


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff\xfe", b"1", b""])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        Decoder().feed(struct.pack(">I", len(body)) + body)


def test_a_frame_that_claims_too_much_is_refused_before_it_comes() -> None:
    with pytest.raises(WireError, match="limit"):
        Decoder().feed(struct.pack(">I", MAX_FRAME_BYTES + 1))


def test_events_and_actions_survive_the_wire() -> None:
    event = m.WorkerReady(worker="w", left=3, inventory={"step": 7})
    action = m.Leave(node="n", generation=3, why="x")
    (got_event, got_action) = Decoder().feed(encode(event.model_dump()) + encode(action.model_dump()))
    assert m.event_adapter.validate_python(got_event) == event
    assert m.action_adapter.validate_python(got_action) == action


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError):
        m.event_adapter.validate_json(json.dumps({"kind": "format_disk"}))
