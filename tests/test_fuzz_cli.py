"""Whatever stands on the command line: no traceback, exit code 0 or 2, and an error is one line."""

import os
import re
from pathlib import Path

import pytest
from fuzz_cli import command_lines, make_places, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("EPS_FUZZ", "150"))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_places(tmp_path_factory.mktemp("places"))


@settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize="EPS_FUZZ" not in os.environ,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(data=st.data())
def test_no_command_line_gives_a_traceback(data: st.DataObject, places: dict[str, str], tmp_path: Path) -> None:
    line = data.draw(command_lines(places), label="eps-proto")
    code, out, err = outcome(line, tmp_path / "scratch")
    assert code in (0, 2), (line, code, err)
    assert "Traceback" not in out + err
    for device in ("/dev/null", "/dev/full", "/dev/zero"):
        assert Path(device).is_char_device(), line
    if code == 2:
        assert re.search(r"(^|\n)error: [^\n]+\n$", err), (line, err)
