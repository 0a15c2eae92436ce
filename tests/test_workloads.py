"""Generated chats: their shape, and that equal numbers give equal workloads."""

from typing import Any

import numpy as np
import pytest

from pagekeeper.traces import TraceRequest
from pagekeeper.workloads import ChatWorkload


def chat(**changes: Any) -> list[TraceRequest]:
    given: dict[str, Any] = dict(
        requests=12, users=2, turns=3, system_tokens=50, message_tokens=20, answer_tokens=30
    )
    return list(ChatWorkload(**(given | changes)))


def texts(requests: list[TraceRequest]) -> list[tuple[list[int], list[int]]]:
    return [(request.prompt.array().tolist(), request.output.array().tolist()) for request in requests]


def test_equal_numbers_give_equal_workloads() -> None:
    assert texts(chat(seed=5)) == texts(chat(seed=5))


def test_one_workload_gives_the_same_requests_every_time() -> None:
    workload = ChatWorkload(requests=5)
    assert texts(list(workload)) == texts(list(workload))


def test_another_seed_gives_other_lengths_and_other_tokens() -> None:
    one, other = chat(seed=5), chat(seed=6)
    assert [len(request.prompt) for request in one] != [len(request.prompt) for request in other]
    assert not (one[0].prompt.array()[:50] == other[0].prompt.array()[:50]).any()


def test_a_shorter_workload_is_the_beginning_of_a_longer_one() -> None:
    assert texts(chat(requests=5)) == texts(chat(requests=12))[:5]


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    first, second, third = (request for request in chat() if request.session == chat()[0].session)
    for earlier, later in ((first, second), (second, third)):
        said = np.concatenate([earlier.prompt.array(), earlier.output.array()])
        assert np.array_equal(later.prompt.array()[: len(said)], said)
        assert len(later.prompt) > len(said)


def test_users_take_turns_and_start_another_conversation_when_one_is_over() -> None:
    sessions = [request.session for request in chat(requests=12, users=2, turns=3)]
    assert sessions[0:6:2] == [sessions[0]] * 3
    assert sessions[1:6:2] == [sessions[1]] * 3
    assert len(set(sessions)) == 4
    assert set(sessions[:6]).isdisjoint(sessions[6:])


def test_conversations_share_the_system_prompt_and_nothing_else() -> None:
    first, second = (request.prompt.array() for request in chat()[:2])
    common = min(len(first), len(second))
    assert np.array_equal(first[:50], second[:50])
    assert not (first[50:common] == second[50:common]).any()


def test_without_a_system_prompt_conversations_share_nothing() -> None:
    first, second = (request.prompt.array() for request in chat(system_tokens=0)[:2])
    common = min(len(first), len(second))
    assert not (first[:common] == second[:common]).any()


def test_lengths_lie_around_their_means() -> None:
    requests = chat(requests=400, turns=1, message_tokens=20, answer_tokens=30)
    messages = [len(request.prompt) - 50 for request in requests]
    answers = [len(request.output) for request in requests]
    assert (min(messages), max(messages)) == (10, 30)
    assert (min(answers), max(answers)) == (15, 45)


def test_a_mean_of_one_token_gives_no_empty_message() -> None:
    assert {len(request.prompt) for request in chat(turns=1, system_tokens=0, message_tokens=1)} == {1}


def test_requests_arrive_in_order() -> None:
    arrivals = [request.arrival_s for request in chat()]
    assert len(arrivals) == 12
    assert arrivals == sorted(arrivals)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("requests", -1, "at least 0"),
        ("users", 0, "at least 1"),
        ("turns", 0, "at least 1"),
        ("system_tokens", -1, "at least 0"),
        ("message_tokens", 0, "at least 1"),
        ("answer_tokens", 0, "at least 1"),
        ("seed", -1, r"from 0 to 2\*\*63 - 1"),
        ("seed", 2**63, r"from 0 to 2\*\*63 - 1"),
    ],
)
def test_a_number_out_of_range_is_named(field: str, value: int, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{field}={value}: must be {allowed}"):
        chat(**{field: value})
