"""A store's error as one sentence: no XML, no terminal colours, no request."""

from __future__ import annotations

import pytest

from pk.tiering.store_errors import WORDS_MAX, error_text

XML = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message>'
    "<StringToSign>AWS4-HMAC-SHA256&#xA;20261123T125724Z</StringToSign></Error>"
)
RUST = (
    "Generic S3 error: Error performing GET http://127.0.0.1:1/b?list-type=2&prefix=x%2F in "
    "15.6ms, after 2 retries, max_retries: 2, retry_timeout: 3s  - Server returned non-2xx status "
    "code: 403 Forbidden: \n\x1b[31m↳\x1b[0m "
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RUST + XML.format("RequestTimeTooSkewed", "The difference …"), "synchronise them"),
        (RUST + XML.format("InvalidAccessKeyId", "…"), "check tier_access_key_id"),
        ("An error occurred (XAdminUserNotFound) when calling PutObject", "tier_access_key_id"),
        (RUST + XML.format("SignatureDoesNotMatch", "…"), "check tier_secret_access_key"),
        (XML.format("NoSuchBucket", "…"), "the bucket does not exist: create it"),
        (RUST + XML.format("AccessDenied", "Access Denied"), "access is denied"),
        ("[Errno 30] Read-only file system: '/x'", "read-only: give pk write access"),
        ('Could not connect to the endpoint URL: "http://h:1/b/a?x=y"', "is it running"),
        ("error sending request for url (http://h:1/b): tcp connect error", "is it running"),
        ("[Errno 16] Please reduce your request rate.", "the store asks for fewer requests"),
        ("no answer within 10 s", "no answer within 10 s"),
        (XML.format("Odd", "Something&#xA;else."), "Something else"),
        (RUST.replace("403 Forbidden", "500"), "500:"),
    ],
)
def test_each_cause_has_its_sentence(text: str, words: str) -> None:
    said = error_text(text)
    assert words in said
    assert len(said) <= WORDS_MAX + 2
    assert not set("<>\x1b\n") & set(said)
    assert "StringToSign" not in said
    assert "list-type" not in said


def test_a_long_text_is_cut_between_words() -> None:
    said = error_text("word " * 1_000)
    assert said.endswith("word …")
    assert len(said) <= WORDS_MAX + 2
