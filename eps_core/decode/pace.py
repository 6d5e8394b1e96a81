"""How many tokens to draft: the number whose expected tokens a millisecond, by what was accepted and what steps cost so
far, are the most. 0, a plain dense step, is among them."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from eps_core.config.speculative import SpeculativeConfig

RECENT = 8  # costs of each kind that count: contexts grow, machines have moods
MEMORY = 0.97  # what a round's counts of acceptance weigh one round later
PRIOR, PRIOR_WEIGHT = 0.9, 2.0  # acceptance before anything is known, in drafts
DENSE_PROBES = 2  # dense steps before the first drafts; the first step of a run is not measured
GAIN = 1.03  # drafting must promise this much; below it dense steps are as good
FIRST_REST, LONGEST_REST = 16, 512  # dense steps between probes while drafting does not pay


class Pace:
    """The number of drafts of each round. Fixed, or learnt: everything it is told is a measurement of this run."""

    def __init__(self, verify: SpeculativeConfig) -> None:
        self.fixed, self.most = verify.draft, verify.most
        self.offered = [0.0] * verify.most
        self.accepted = [0.0] * verify.most
        self._costs: dict[str | int, deque[float]] = {}
        self._rest, self._resting = FIRST_REST, 0
        self._load = 0, 0

    # ---- what happened ----

    def saw_load(self, num_sequences: int, num_tokens: int) -> None:
        """So many sequences run in the next round, with so many tokens of context in all. Where sequences ended, or
        another prompt began, what steps cost before no longer counts: dense steps, which are not run where drafting
        pays, would look as slow as those of the larger load for good."""
        before, self._load = self._load, (num_sequences, num_tokens)
        if num_sequences != before[0] or num_tokens < before[1]:
            self._costs.clear()
            self._rest, self._resting = FIRST_REST, 0

    def saw_round(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Record how many drafts of each sequence were offered and how many, from the first on, were accepted."""
        for counts in (self.offered, self.accepted):
            counts[:] = [count * MEMORY for count in counts]
        for offered, kept in zip(drafted, accepted, strict=True):
            for depth in range(min(offered, kept + 1)):  # what follows a miss says nothing
                self.offered[depth] += 1
                self.accepted[depth] += depth < kept

    def saw_cost(self, kind: str | int, ms: float) -> None:
        """Record the cost of a `dense` or a `draft` step, or of a verify pass of so many rows a sequence."""
        self._costs.setdefault(kind, deque(maxlen=RECENT)).append(ms)

    # ---- what follows ----

    def acceptance(self, depth: int) -> float:
        """Return the acceptance of a draft at `depth` (0: the first) whose predecessors were accepted; depths of which
        little is known lean on all the others."""
        all_offered, all_accepted = sum(self.offered), sum(self.accepted)
        overall = (all_accepted + PRIOR * PRIOR_WEIGHT) / (all_offered + PRIOR_WEIGHT)
        return (self.accepted[depth] + overall * PRIOR_WEIGHT) / (self.offered[depth] + PRIOR_WEIGHT)

    def cost(self, kind: str | int) -> float | None:
        """ms, the median of the last ones; of rows that never ran, along the line through those that did."""
        if kind in self._costs:
            return median(self._costs[kind])
        dense = self._costs.get("dense")
        if not isinstance(kind, int) or dense is None:
            return None
        known = sorted((rows, median(ms)) for rows, ms in self._costs.items() if isinstance(rows, int))
        known = [(1, median(dense)), *(pair for pair in known if pair[0] > 1)]
        if len(known) == 1:
            return known[0][1]
        above = next((i for i, (rows, _) in enumerate(known) if rows > kind), len(known) - 1)
        (x0, y0), (x1, y1) = known[max(above, 1) - 1], known[max(above, 1)]
        return max(y0 + (y1 - y0) * (kind - x0) / (x1 - x0), known[0][1])

    def rate(self, drafts: int) -> float | None:
        """Expected tokens a millisecond of a round of so many drafts; None while a cost is unknown."""
        if drafts == 0:
            dense = self.cost("dense")
            return None if dense is None else 1 / dense
        draft, verify = self.cost("draft"), self.cost(drafts + 1)
        if draft is None or verify is None:
            return None
        expected, still = 1.0, 1.0
        for depth in range(drafts):
            still *= self.acceptance(depth)
            expected += still
        return expected / (drafts * draft + verify)

    def next(self) -> int:
        """Drafts of the next round."""
        if self.fixed is not None:
            return self.fixed
        if len(self._costs.get("dense", ())) < DENSE_PROBES:
            return 0
        rates = [self.rate(drafts) for drafts in range(self.most + 1)]
        if rates[-1] is None:
            return min(4, self.most)  # the first probe
        dense = rates[0]
        assert dense is not None
        best = max(range(1, self.most + 1), key=lambda drafts: rates[drafts] or 0.0)
        if (rates[best] or 0.0) > GAIN * dense:
            self._rest, self._resting = FIRST_REST, 0
            return best
        self._resting += 1
        if self._resting <= self._rest:
            return 0
        self._rest, self._resting = min(2 * self._rest, LONGEST_REST), 0
        return best
