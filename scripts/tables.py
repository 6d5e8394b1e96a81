"""Remake the tables of results/*.md from their raw rows.

    python scripts/tables.py            # writes each table again
    python scripts/tables.py --check    # exit status 1 if a page holds others

A table lies between two comments. The first holds the command that prints it, of a script of this folder:
`<!-- experiments/real/run.py --tables peers -o results/real.jsonl.gz -->`; the second is `<!-- end -->`.
"""

import argparse
import io
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from eps_core.errors import exit_code

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
BLOCK = re.compile(r"<!-- ([\w/]+\.py [^\n]+) -->\n(.*?)<!-- end -->", re.S)


def printed(command: str) -> str:
    """Return what a script of this folder prints; paths in `command` begin at the root of the repository."""
    name, *arguments = shlex.split(command)
    given = [str(ROOT / one) if one.partition("/")[0] == "results" else one for one in arguments]
    before, out = sys.argv, io.StringIO()
    try:
        sys.argv = [name, *given]
        with redirect_stdout(out):
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv = before
    return out.getvalue()


def remade(page: str) -> str:
    """Return a page with each of its tables printed again."""
    return BLOCK.sub(lambda block: f"<!-- {block[1]} -->\n{printed(block[1])}<!-- end -->", page)


def update(doc: str | None, folder: Path, remade: Callable[[str], str]) -> int:
    """Write the pages of a folder whose generated parts are out of date; with --check only return 1 where one is."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    check, stale = parser.parse_args().check, []
    for path in sorted(folder.glob("*.md")):
        page = path.read_text("utf-8")
        new = remade(page)
        if new != page:
            stale.append(path.name)
            if not check:
                path.write_text(new, "utf-8")
    print(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


def main() -> int:
    return update(__doc__, ROOT / "results", remade)


if __name__ == "__main__":
    sys.exit(exit_code(main))
