"""Compares the numbers of tests/golden/decode.json with what this machine computes, or writes them again."""

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file instead of comparing with it")
    write = parser.parse_args().write
    if not write:
        import pytest

        sys.exit(pytest.main([str(TESTS / "test_golden.py")]))
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    import golden_runs

    golden_runs.write()


if __name__ == "__main__":
    main()
