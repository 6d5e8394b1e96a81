"""The note on an FPGA counts right: microGPT's multiplications one by one, and its bounds in whole numbers."""

import math
import re
from itertools import count, islice
from pathlib import Path

import numpy as np

CORE = Path(__file__).parent.parent / "eps_core" / "README.md"
WIDTH, HEADS, CONTEXT, VOCABULARY, GROUP = 16, 4, 16, 27, 4
MULTIPLIERS = 3
ONE = 256  # of Q8.8


class Counted:
    """A token of microGPT, of which only the multiplications of products are of interest."""

    def __init__(self) -> None:
        self.linear = self.attention = self.parameters = self.scoring = 0

    def layer(self, inputs: int, outputs: int) -> None:
        for _ in range(outputs):
            for _ in range(inputs):
                self.linear += 1
        self.parameters += inputs * outputs

    def token(self, tokens: int) -> "Counted":
        self.parameters += (VOCABULARY + CONTEXT) * WIDTH  # embeddings: looked up
        for _ in range(4):  # q, k, v and the output
            self.layer(WIDTH, WIDTH)
        for _ in range(HEADS):
            for _ in range(tokens):
                for _ in range(WIDTH // HEADS):
                    self.attention += 2  # q k, and a weight times v
        self.layer(WIDTH, 4 * WIDTH)
        self.layer(4 * WIDTH, WIDTH)
        self.layer(WIDTH, VOCABULARY)
        return self

    def scored(self, tokens: int) -> "Counted":
        for _ in range(HEADS):
            for _ in range(tokens // GROUP):
                for _ in range(WIDTH // HEADS):
                    self.scoring += 1
        return self


def note() -> str:
    text = CORE.read_text().split("## On an FPGA: arithmetic\n")[1].split("\n## ")[0]
    return " ".join(text.split())


def test_the_notes_numbers_are_those_of_the_loops() -> None:
    one, text, cycles = Counted().token(CONTEXT).scored(CONTEXT), note(), 80e6 / 56e3
    saved = Counted().token(CONTEXT).attention - Counted().token(CONTEXT // 2).attention
    net = saved - one.scoring
    kv_bytes, box_bytes = 2 * WIDTH * CONTEXT * 2, 2 * WIDTH * (CONTEXT // GROUP) * 2
    room, share = MULTIPLIERS * cycles - one.linear, 100 * net / MULTIPLIERS / cycles

    def most(half: bool) -> int:
        """Tokens that fit, tried one by one."""
        for tokens in count(1):
            whole = Counted().token(tokens).attention
            if (whole / 2 + WIDTH * tokens / GROUP if half else whole) > room:
                return tokens - 1
        raise AssertionError

    equal = next(t for t in islice(count(1), 1000) if Counted().token(t).attention >= one.linear)
    assert math.ceil((one.linear + one.attention) / cycles) == MULTIPLIERS
    for said in (
        f"{one.parameters:,} parameters",
        f"= {int(cycles):,} cycles",
        f"multiply {one.linear:,} times, attention over {CONTEXT} tokens {one.attention} times: "
        f"{one.linear + one.attention:,}",
        f"a ring of {kv_bytes:,} bytes, {kv_bytes * 8 / (18 * 1024):.2f} of a block RAM",
        f"adds {box_bytes} bytes, a quarter",
        f"takes {one.scoring} multiplications",
        f"{math.ceil(one.scoring / MULTIPLIERS)} cycles on three multipliers",
        f"saves {saved}, so {net} are left, {net // MULTIPLIERS} cycles of 1,428: {share:.1f} %",
        f"fits {most(False)} tokens, half of the groups by `box` {most(True)}",
        f"at {equal} tokens",
    ):
        assert said in text, said
    assert kv_bytes == 4 * box_bytes


def fixed(x: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(x * ONE), -(2**15), 2**15 - 1).astype(np.int64)


def test_fixed_point_is_as_exact_as_the_note_says() -> None:
    rng, dim, text = np.random.default_rng(0), WIDTH // HEADS, note()
    assert f"-128 to {(2**15 - 1) / ONE:.3f} in steps of 1/{ONE}" in text
    worst = dim * (2 * 8 / (2 * ONE) + 1 / (2 * ONE) ** 2) / math.sqrt(dim)
    assert f"off by at most {worst:.3f}" in text
    (bits,) = map(int, re.findall(r"\((\d+) bits\)", text))
    assert 2 ** (bits - 2) <= dim * int(fixed(np.array(-200.0))) ** 2 < 2 ** (bits - 1)
    for _ in range(300):
        q, keys = rng.uniform(-8, 8, dim), rng.uniform(-8, 8, (GROUP, dim))
        whole = fixed(keys) @ fixed(q)  # Q16.16
        logits = whole >> 1  # sqrt(4)
        assert np.abs(logits / ONE**2 - keys @ q / 2).max() <= worst + ONE**-2
        assert np.abs(logits / ONE).max() <= 128 * ONE  # a Q8.8 number still
        low, high = fixed(keys).min(axis=0), fixed(keys).max(axis=0)
        bound = sum(int(x) * int(b if x >= 0 else a) for x, a, b in zip(fixed(q), low, high, strict=True))
        assert bound >= whole.max()
