"""Blocks: without loss, small, exact, and in place of the text at any moment."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import around, event, step, worked_case, write

from ridethrough.ledger import recorder
from ridethrough.ledger.blocks import BlockError, expand, make_block, read_block
from ridethrough.ledger.compact import compact
from ridethrough.ledger.incidents import incidents
from ridethrough.ledger.partition import partition
from ridethrough.ledger.reading import LedgerError, read_events, read_split
from ridethrough.ledger.recorder import Recorder

INTS = st.integers(-(2**70), 2**70)
VALUES = st.one_of(INTS, st.floats(), st.booleans(), st.none(), st.text(max_size=3))
PARTS = st.lists(st.tuples(st.sampled_from(["data_wait", "eval", "x"]), INTS, INTS).map(list), max_size=3)
STEPS = st.fixed_dictionaries(
    {"t_ns": INTS, "kind": st.just("step"), "generation": INTS, "rank": INTS, "step": INTS, "t0_ns": INTS}
    | {"t1_ns": INTS, "parts": PARTS},
    optional={"loss": VALUES, "tokens": VALUES, "note": VALUES},
)
OTHERS = st.fixed_dictionaries({"t_ns": INTS, "kind": st.sampled_from(["save", "step"])}, optional={"a": VALUES})


def same(a: object, b: object) -> bool:
    """Equal with types, and NaN equal to itself."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.one_of(STEPS, OTHERS), max_size=12))
def test_nothing_is_lost_whatever_was_written(events: list[dict]) -> None:
    block = read_bytes(make_block(json.dumps(e).encode() for e in events))
    assert [number for number, _ in expand(block)] == list(range(len(events)))
    assert same([e for _, e in expand(block)], json.loads(json.dumps(events)))


def read_bytes(data: bytes):
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return read_block(Path(file.name))


def test_a_million_steps_of_a_rank_stay_below_50_mb() -> None:
    rng, t, lines = random.Random(0), 2 * 10**12, []
    for number in range(1, 20_001):
        t0, t = t, t + 50_000_000 + rng.randrange(5_000_000)
        a = t0 + rng.randrange(80_000, 200_000)
        loss = struct.unpack("f", struct.pack("f", 2 + rng.random()))[0]
        fields = {"generation": 3, "rank": 1, "step": number, "t0_ns": t0, "t1_ns": t}
        parts = [["data_wait", a, a + rng.randrange(10**6)]]
        lines.append(json.dumps({"t_ns": t, "kind": "step", **fields, "parts": parts, "loss": loss, "tokens": 1024}))
    size = len(make_block(line.encode() for line in lines))
    assert size * 50 < 50e6
    assert size * 10 < sum(map(len, lines))


def test_the_figures_are_the_same_from_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.ledger.compact.SMALLEST_BYTES", 100)
    other_boot = [step(n, n + 0.5, n + 20, generation=1, rank=1, parts=(("eval", n, n + 0.25),)) for n in range(13, 16)]
    write(tmp_path, "h-coordinator-1", around(2))
    write(tmp_path, "h-worker-2", worked_case(), tail='{"t_ns": 5, "ki')
    write(tmp_path, "g-worker-3", [event("enter", 9.9, generation=1, rank=1), *other_boot], boot="c", wall_ns=7)
    before, part = read_events(tmp_path), partition(read_split(tmp_path))
    assert len(compact(tmp_path)) == 3
    assert compact(tmp_path) == []
    assert {file.suffix for file in (tmp_path / "events").iterdir()} == {".block"}
    after = read_events(tmp_path)
    strip = [[{k: v for k, v in e.items() if k != "file"} for e in events] for events in (before, after)]
    assert same(*strip)
    again = partition(read_split(tmp_path))
    assert (again.states_ns, again.segments) == (part.states_ns, part.segments)
    assert partition(after).segments == part.segments
    assert incidents(read_split(tmp_path)) == incidents(before)


def test_what_is_open_or_small_or_damaged_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(tmp_path, "worker") as small:
        small.emit("x")
    assert compact(tmp_path) == []
    monkeypatch.setattr("ridethrough.ledger.compact.SMALLEST_BYTES", 100)
    with Recorder(tmp_path, "agent") as open_one:
        open_one.emit("x")
        assert [path.name for path in compact(tmp_path)] == [small.path.with_suffix(".block").name]
    write(tmp_path, "h-worker-2", worked_case(), tail='{"t_ns": 5, "ki\n{"t_ns": 6, "kind": "x"}\n')
    assert len(compact(tmp_path)) == 1  # the agent's
    with pytest.raises(LedgerError, match=r"h-worker-2\.jsonl:"):
        read_split(tmp_path)


def test_segments_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr("ridethrough.ledger.compact.SMALLEST_BYTES", 100)

    def emit(who: Recorder, low: int, high: int) -> None:
        for n in range(low, high):
            who.emit("step", generation=0, rank=0, step=n, t0_ns=n, t1_ns=n + 1, t_ns=n + 1, parts=[])

    with Recorder(tmp_path, "worker") as who:
        emit(who, 0, 50)
        assert len(compact(tmp_path)) >= 2  # all but the last
        emit(who, 50, 100)
    compact(tmp_path)
    with Recorder(tmp_path, "worker") as who:  # the process id is used again: a new segment, not the block's name
        emit(who, 100, 110)
    (table,) = read_split(tmp_path).steps.values()
    assert table.step.tolist() == list(range(110))
    assert [e["step"] for e in read_events(tmp_path) if e["kind"] == "step"] == list(range(110))


def test_a_damaged_block_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.ledger.compact.SMALLEST_BYTES", 100)
    write(tmp_path, "h-worker-2", worked_case())
    (block,) = compact(tmp_path)
    data = bytearray(block.read_bytes())
    data[-5] ^= 1
    block.write_bytes(data)
    with pytest.raises(BlockError, match="does not match its hash"):
        read_block(block)
    with pytest.raises(LedgerError, match=r"h-worker-2\.block is damaged"):
        read_split(tmp_path)
    block.write_bytes(data[:40])
    with pytest.raises(LedgerError, match="damaged"):
        read_events(tmp_path)


def test_a_crash_between_block_and_unlink_counts_nothing_twice(tmp_path: Path) -> None:
    write(tmp_path, "h-worker-2", worked_case())
    text = tmp_path / "events" / "h-worker-2.jsonl"
    text.with_suffix(".block").write_bytes(make_block(text.read_bytes().split(b"\n")))
    assert sum(len(t) for t in read_split(tmp_path).steps.values()) == 13
