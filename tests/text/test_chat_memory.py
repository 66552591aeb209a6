"""What clients choose fills no memory."""

from __future__ import annotations

from ninfer.text.chat import MAX_KNOWN_OPTIONS, ChatTemplate


def test_options_of_clients_are_not_remembered_without_bound() -> None:
    template = ChatTemplate("{{ messages[0].content }}{% if add_generation_prompt and think %}<think>{% endif %}")
    for i in range(3 * MAX_KNOWN_OPTIONS):
        assert template.opens_thinking(think=i % 2 == 0, other=i) == (i % 2 == 0)
        assert len(template._opens_thinking) <= MAX_KNOWN_OPTIONS
