"""Both ends know the token and speak one protocol, or each is told why not."""

from __future__ import annotations

from typing import Any

import pytest

from ridethrough.generation import handshake as h
from ridethrough.generation.messages import PROTOCOL
from ridethrough.version import __version__

TOKEN = "t" * 32
OTHER: dict[str, Any] = {"protocol": PROTOCOL + 1, "version": "9.9.9"}


def test_both_prove_that_they_know_the_token_and_never_say_it() -> None:
    asked = h.challenge()
    answered = h.answer(TOKEN, asked)
    proof = h.prove(TOKEN, asked, answered)
    h.check_proof(TOKEN, asked, answered, proof)
    assert TOKEN not in f"{asked}{answered}{proof}"


def test_a_wrong_token_is_found_by_either_end() -> None:
    asked = h.challenge()
    answered = h.answer("x" * 32, asked)
    with pytest.raises(h.Refused, match="the agent does not know this job's token"):
        h.prove(TOKEN, asked, answered)
    with pytest.raises(h.Refused, match="the coordinator does not know this job's token"):
        h.check_proof(TOKEN, asked, answered, h.prove("x" * 32, asked, answered))


def test_an_answer_does_not_fit_another_challenge() -> None:
    answered = h.answer(TOKEN, h.challenge())
    with pytest.raises(h.Refused, match="token"):
        h.prove(TOKEN, h.challenge(), answered)


def test_another_protocol_is_refused_by_either_end_with_both_versions_named() -> None:
    asked = h.challenge()
    ours, theirs = f"version {__version__}) speaks {PROTOCOL}:", f"version 9.9.9) speaks protocol {PROTOCOL + 1},"
    with pytest.raises(h.Refused) as told:
        h.answer(TOKEN, {**asked, **OTHER})
    assert f"the coordinator ({theirs} this agent ({ours}" in str(told.value)
    with pytest.raises(h.Refused) as told:
        h.prove(TOKEN, asked, {**h.answer(TOKEN, asked), **OTHER})
    assert f"the agent ({theirs} this coordinator ({ours}" in str(told.value)
