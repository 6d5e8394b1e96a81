"""The text that figures speak of is the one that was shipped, on every machine."""

import gzip
import hashlib
from pathlib import Path

import pytest

from eps_core.errors import ConfigError
from eps_core.tasks import corpus
from experiments.methods import texts


def test_the_shipped_text_is_ascii_and_has_the_hash_that_identifies_it() -> None:
    text = corpus.corpus()
    assert len(text) == 1_127_047 and text.isascii()
    assert hashlib.sha256(text).hexdigest() == corpus.SHA256
    said = texts.prose()
    assert len(said) == 466_077 and said.isascii() and hashlib.sha256(said).hexdigest() == texts.PROSE_SHA256
    assert texts.haystack("chat").startswith(b"User: Explain assert in Python.\n\nAssistant: The ")


@pytest.mark.parametrize(
    "content", [None, b"", b"no gzip", gzip.compress(b"x = 1\n", mtime=0), corpus.FILE.read_bytes()[:1000]]
)
def test_a_text_that_is_another_or_damaged_is_refused_in_one_line(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text.gz"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr(corpus, "FILE", file)
    corpus.corpus.cache_clear()
    try:
        with pytest.raises(ConfigError, match="install EPS again"):
            corpus.corpus()
    finally:
        corpus.corpus.cache_clear()
