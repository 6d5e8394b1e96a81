"""What is counted of answers that a harness got from a server without EPS and with it."""

import pytest

from eps_core.errors import ConfigError
from experiments.lm_eval.served import compared


def test_answers_are_compared_document_by_document() -> None:
    off = {0: ("1", True), 1: ("2", True), 2: ("3", False), 3: ("4", False)}
    rq = {3: ("4", False), 2: ("5", True), 1: ("6", False), 0: ("7", True)}
    found = compared(off, rq)
    assert found == {"off_right": 2, "rq_right": 2, "lost": 1, "won": 1, "same_text": 1}
    assert compared(off, off | {2: ("3", True)}) == {
        "off_right": 2, "rq_right": 3, "lost": 0, "won": 1, "same_text": 4
    }  # fmt: skip
    with pytest.raises(ConfigError, match="4 documents were answered without EPS and 1 with it"):
        compared(off, {0: ("1", True)})
