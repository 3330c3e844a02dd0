"""The page on messages has a section for every error, and quotes existing messages."""

from __future__ import annotations

from tools import messages as tool

PAGE = tool.PAGE.read_text(encoding="utf-8")
KNOWN = [
    tool.Message("ConfigurationError", "a.py:1", "epochs=...: write a number"),
    tool.Message("PeerError", "a.py:2", "..."),
]


def test_the_page_has_all_errors_and_quotes_existing_messages() -> None:
    assert tool.problems(PAGE, tool.messages(), tool.public_errors()) == []


def test_missing_sections_and_missing_messages_are_reported() -> None:
    page = "## ConfigurationError\n\n| message | more |\n|---|---|\n| `epochs=... write a word` | no |\n"
    assert tool.problems(page, KNOWN, ["ConfigurationError", "PeerError"]) == [
        "troubleshooting.md has no section '## PeerError'",
        "no ConfigurationError has a message like: epochs=... write a word",
    ]


def test_a_quoted_message_may_omit_variable_parts() -> None:
    assert tool.occurs("epochs=...: write", KNOWN[0].text)
    assert not tool.occurs("write ... epochs", KNOWN[0].text)


def test_messages_in_raise_statements_and_functions_are_found() -> None:
    texts = {message.text for message in tool.messages() if message.error == "PrivacyBudgetError"}
    assert any(text.startswith("The privacy budget is spent") for text in texts)
    assert {message.error for message in tool.messages()} >= set(tool.public_errors()) - {"CheckpointError"}
