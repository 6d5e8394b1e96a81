"""Prints the tables of verified decoding from the raw files of scripts/verified.sh.

python scripts/experiments/verified_speed/tables.py results
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from speed_tables import row

from eps_core.errors import exit_code
from eps_core.io import inputs
from eps_core.io.records import Count, Name, Positive, Ratio, Share, read_record
from eps_core.io.schema import current

MEND = "run scripts/verified.sh again"
CELL = {
    "method": Name, "context_tokens": Count, "bytes_ratio": Ratio, "draft_ratio": Ratio, "acceptance": Share,
    "tokens_per_round": Positive, "documents": Count, "documents_equal": Count, "draft_kl_mean": Ratio,
    "setting": dict[str, Any], "verified": dict[str, Any],
}  # fmt: skip
TIMES = {
    "model": Name, "dtype": Name, "context_tokens": Count, "gated_times_as_fast": Positive, "ms": dict[str, Any],
    "c": dict[str, Any], "v": dict[str, Any], "times_as_fast": dict[str, Any],
}  # fmt: skip


def interval(cell: dict[str, Any], name: str) -> str:
    found = cell.get(f"{name}_interval")
    return f"{cell[name]:.3f}" + (f" [{found[0]:.3f}, {found[1]:.3f}]" if found else "")


def depths(cell: dict[str, Any]) -> str:
    """Acceptance at depths 1, 4, 8 and 16, of the drafts whose predecessors were accepted."""
    rates = cell.get("acceptance_by_depth") or []
    return " ".join("-" if len(rates) < d or rates[d - 1] is None else f"{rates[d - 1]:.2f}" for d in (1, 4, 8, 16))


def acceptance_table(folder: Path) -> None:
    print(row("model", "drafter", "context", "T", "g", "accepted (95 %)", "at depth 1 4 8 16", "tokens a round",
              "bytes a token / dense (95 %)", "KL of a draft", "equal to dense"))  # fmt: skip
    print("|" + "---|" * 11)
    for name, model in (("verified.jsonl", "demo"), ("verified-wide.jsonl", "wide")):
        for place, values in inputs.read_jsonl(folder / name, "results", MEND):
            line = current(values)
            if line.get("type") != "cell" or line.get("skipped"):
                continue
            cell, asked = {**line, **read_record(CELL, line, place, MEND)}, line["setting"]
            how = line["verified"]
            # older rows name what their drafts read
            more = [how["select"]] if how.get("select", "step") != "step" else []
            more += [f"{how['weights']} weights"] if how["weights"] != "full" else []
            more += ["{} sink and {} recent tokens".format(*line["sink_recent"])] if cell["method"] != "rq" else []
            rejects = how.get("rule") == "reject"  # of older rows
            more += ["rejection"] if rejects else []
            label = f"`{cell['method']}` {line['group_size']}, {asked['budget']:g}" + "".join(f", {m}" for m in more)
            equal = "-" if rejects else f"{cell['documents_equal']} of {cell['documents']}"
            print(row(
                model, label, f"{cell['context_tokens']:,}", f"{asked['temperature']:g}", how["draft"],
                interval(cell, "acceptance"), depths(cell), f"{cell['tokens_per_round']:.1f}",
                interval(cell, "bytes_ratio"), f"{cell['draft_kl_mean']:.4f}", equal,
            ))  # fmt: skip


def speed_table(folder: Path) -> None:
    print(row("model, dtype", "context", "dense ms", "gate", "c, full / 4-bit", "v(2) v(4) v(8) v(16)",
              "verified, a .90 / .95 / .98", "4-bit drafts, the same"))  # fmt: skip
    print("|" + "---|" * 8)
    for place, line in inputs.read_jsonl(folder / "verified_speed.jsonl", "results", MEND):
        one = read_record(TIMES, line, place, MEND)

        def best(drafter: str) -> str:
            rates = one["times_as_fast"].get(drafter)  # noqa: B023
            if rates is None:
                return "-"
            tops = [max(by_g.items(), key=lambda pair: pair[1]) for by_g in rates.values()]
            return " / ".join(f"{rate:.2f} (g {g})" for g, rate in tops)

        print(row(
            f"{one['model']}, {one['dtype']}", f"{one['context_tokens']:,}", f"{one['ms']['dense']:.1f}",
            f"{one['gated_times_as_fast']:.2f} x", " / ".join(f"{c:.2f}" for c in one["c"].values()),
            " ".join(f"{v:.2f}" for v in one["v"].values()), best("draft"), best("draft_4bit"),
        ))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results"), help="of verified.sh's raw files")
    folder = parser.parse_args().folder
    acceptance_table(folder)
    print()
    speed_table(folder)


if __name__ == "__main__":
    sys.exit(exit_code(main))
