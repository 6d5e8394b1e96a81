"""Eviction policies once more, from their formulas, in loops: they judge `eps_core.eviction` and share no code with
it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from eps_core.eviction.base import Head, Rule

Scores = list[list[list[float]]]  # [L][H][T]


def f(x: np.ndarray | None) -> np.ndarray:
    """What the program may use of a statistic: its float32 value."""
    assert x is not None
    narrow, wide = (np.complex64, np.complex128) if np.iscomplexobj(x) else (np.float32, np.float64)
    return x.astype(narrow).astype(wide)


def single(x: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def pins(head: Head, rule: Rule) -> list[int]:
    by_age = sorted(range(len(head.positions)), key=lambda row: -head.positions[row])
    newest, rest = by_age[: rule.num_recent_tokens], by_age[rule.num_recent_tokens :]
    return newest + [row for row in rest[::-1] if head.positions[row] < rule.num_sink_tokens]


def order(head: Head, scores: list[float], rule: Rule) -> list[int]:
    first = pins(head, rule)
    others = [row for row in range(len(head.positions)) if row not in first]
    return first + sorted(others, key=lambda row: (-single(scores[row]), row))


def by_scores(layers: list[list[Head]], scores: Scores, budget: int, rule: Rule) -> list[list[list[int]]]:
    return [
        [sorted(order(head, scores[a][b], rule)[:budget]) for b, head in enumerate(heads)]
        for a, heads in enumerate(layers)
    ]


def text_order(head: Head) -> list[int]:
    return sorted(range(len(head.positions)), key=lambda row: head.positions[row])


def judged(head: Head, rule: Rule) -> list[int]:
    rows = text_order(head)
    return rows[: max(len(rows) - rule.num_recent_tokens, 0)]


def uniform(rule: Rule, layer: int, kv_head: int, position: int) -> float:
    key = np.random.SeedSequence([rule.seed, layer, kv_head]).generate_state(2, np.uint64)
    raw = int(np.random.Philox(key=key).random_raw(position + 1)[position])
    return min(((raw >> 11) + 0.5) / 2**53, 1 - 2.0**-53)


def sees(head: Head, query: int, num_queries: int, row: int) -> bool:
    return bool(head.positions[row] <= head.length - num_queries + query)


# --------------------------------------------------------------------------------------------------- scores of one head


def streaming(head: Head, rule: Rule) -> list[float]:
    return [float(p - head.length) for p in head.positions]


def over_queries(statistic: np.ndarray | None) -> list[float]:
    x = f(statistic)
    return [float(sum(x[r, t] for r in range(len(x)))) for t in range(x.shape[1])]


def h2o(head: Head, rule: Rule) -> list[float]:
    return over_queries(head.sums)


def rswa(head: Head, rule: Rule) -> list[float]:
    return [math.inf if p < head.prompt else float(p - head.length) for p in head.positions]


def oracle(head: Head, rule: Rule) -> list[float]:
    return over_queries(head.future)


def scissorhands(head: Head, rule: Rule) -> list[float]:
    a = f(head.window)
    queries, rows = range(a.shape[1]), range(a.shape[2])
    visible = [[sees(head, w, len(queries), t) for t in rows] for w in queries]
    level = [(1 - 1e-6) / max(sum(of_query), 1) for of_query in visible]
    found = []
    for t in rows:
        judges = [(r, w) for r in range(len(a)) for w in queries if visible[w][t]]
        found.append(sum(a[r, w, t] >= level[w] for r, w in judges) / max(len(judges), 1))
    return found


def near(values: list[float], i: int, reach: int) -> list[float]:
    return [values[j] for j in range(i - reach, i + reach + 1) if 0 <= j < len(values)]


def window_mass(head: Head, rule: Rule, reach: int, pooled: Callable[[list[float]], float]) -> list[float]:
    """The window's weight of the rows judged, mean over query heads, pooled over those within `reach`; 0 of others."""
    a, rows, found = f(head.window), judged(head, rule), [0.0] * len(head.positions)
    mass = [sum(a[r, w, t] for w in range(a.shape[1]) for r in range(len(a))) / len(a) for t in rows]
    for i, t in enumerate(rows):
        found[t] = pooled(near(mass, i, reach))
    return found


def snapkv(head: Head, rule: Rule) -> list[float]:
    return window_mass(head, rule, 2, lambda values: sum(values) / 5)


def adakv_head(head: Head, rule: Rule) -> list[float]:
    return window_mass(head, rule, 3, max)


def units(head: Head) -> list[np.ndarray]:
    return [k / np.linalg.norm(k) if k.any() else k for k in f(head.keys)]


def keydiff(head: Head, rule: Rule) -> list[float]:
    unit = units(head)
    anchor = sum(unit) / len(unit)
    size = math.sqrt(anchor @ anchor)
    return [-float(u @ anchor) / size if size > 1e-6 else 0.0 for u in unit]


def rkv(head: Head, rule: Rule) -> list[float]:
    keys, queries, rows = f(head.keys), f(head.queries), judged(head, rule)
    num_queries, total = queries.shape[1], len(head.positions)
    mean = dict.fromkeys(rows, 0.0)
    for w in range(num_queries):
        visible = [t for t in rows if sees(head, w, num_queries, t)]
        logit = {
            t: max(queries[r, w] @ keys[t] / math.sqrt(keys.shape[1]) for r in range(len(queries))) for t in visible
        }
        mass = {t: math.exp(logit[t]) for t in visible}
        for t in visible:
            mean[t] += mass[t] / sum(mass.values()) / num_queries
    importance = [0.0] * total
    for i, t in enumerate(rows):
        importance[t] = max(near([mean[row] for row in rows], i, 3))

    unit, text = units(head), text_order(head)
    cosines = np.zeros((total, total))  # rows and columns in the order of the text
    for i, a in enumerate(text):
        for j, b in enumerate(text):
            cosines[i, j] = 0.0 if i == j else unit[a] @ unit[b]
        similar = [j for j in range(total) if cosines[i, j] > 0.5]
        if similar:
            cosines[i, similar[-1]] = 0.0
    mean_cosine = [sum(cosines[i, j] for i in range(total)) / total for j in range(total)]
    mass_of = [math.exp(x) for x in mean_cosine]
    found = [0.0] * total
    for j, t in enumerate(text):
        found[t] = 0.07 * importance[t] - 0.93 * mass_of[j] / sum(mass_of)
    return found


def nexus_weights(head: Head) -> list[float]:
    a, unit = f(head.window), np.array(units(head))
    direct = [float(sum(a[r, w, t] for r in range(len(a)) for w in range(a.shape[1]))) for t in range(a.shape[2])]
    similar = np.array([[float(x @ y) ** 2 for y in unit] for x in unit])
    walk = np.array([row / sum(row) if sum(row) > 0 else row for row in similar])
    now = direct
    for _ in range(2):
        now = [0.5 * direct[t] + 0.5 * sum(walk[i, t] * now[i] for i in range(len(now))) for t in range(len(now))]
    return now


# ------------------------------------------------------------------------------------ scores that look at several heads


def tova(layers: list[list[Head]]) -> Scores:
    found = []
    for heads in layers:
        last = [f(head.window)[r, -1] for head in heads for r in range(len(f(head.window)))]
        found.append([[float(sum(x[t] for x in last)) / len(last) for t in range(len(last[0]))]] * len(heads))
    return found


def random(layers: list[list[Head]], rule: Rule) -> Scores:
    def of(head: Head, a: int, b: int) -> list[float]:
        return [uniform(rule, a, b, int(p)) for p in head.positions]

    return [[of(head, a, b) for b, head in enumerate(heads)] for a, heads in enumerate(layers)]


def nexus(layers: list[list[Head]], rule: Rule) -> Scores:
    def key(weight: float, u: float) -> float:  # a monotone function of u^(1/weight)
        return math.log(weight) - math.log(-math.log(u)) if weight > 0 else -math.inf

    def of(head: Head, draws: list[float]) -> list[float]:
        return [key(weight, u) for weight, u in zip(nexus_weights(head), draws, strict=True)]

    draws = random(layers, rule)
    return [[of(head, draws[a][b]) for b, head in enumerate(heads)] for a, heads in enumerate(layers)]


def triattention_head(head: Head) -> list[float]:
    keys, mean, modulus = f(head.keys), f(head.query_mean), f(head.query_abs)
    omega, half, now = head.frequencies, keys.shape[1] // 2, head.length
    best = [-math.inf] * len(keys)
    for r in range(len(mean)):
        raw = []
        for k, p in zip(keys, head.positions, strict=True):
            score = 0.0
            for i in range(half):
                before = complex(k[i], k[i + half]) * np.exp(-1j * omega[i] * p)
                phase = np.angle(mean[r, i] * np.conj(before))
                size = abs(mean[r, i]) * abs(before)
                trig = sum(math.cos(omega[i] * (now - p + 2**d) + phase) for d in range(17)) / 17
                score += size * trig + (modulus[r, i] - abs(mean[r, i])) * abs(before)
            raw.append(score)
        centre, spread, largest = np.mean(raw), np.std(raw), max(map(abs, raw))
        z = [(x - centre) / spread if spread > 1e-6 * largest else 0.0 for x in raw]
        best = [max(pair) for pair in zip(best, z, strict=True)]
    return best


def triattention(layers: list[list[Head]]) -> Scores:
    each = [[triattention_head(head) for head in heads] for heads in layers]
    mean = [[float(np.mean([row[b][t] for row in each])) for t in range(len(each[0][b]))] for b in range(len(each[0]))]
    return [mean] * len(layers)


def epikv(layers: list[list[Head]]) -> Scores:
    text = text_order(layers[0][0])
    jumps = []
    for i in range(len(text)):
        total = 0.0
        for a, heads in enumerate(layers):
            depth = (a + 0.5) / len(layers)
            weight = 1 if 0.25 <= depth <= 0.5 else -1 if 0.5 < depth <= 0.75 else 0
            if i:
                square = 0.0
                for head in heads:
                    keys, half = f(head.keys), len(head.frequencies)
                    pair = []
                    for t in (text[i - 1], text[i]):
                        turn = np.exp(-1j * head.frequencies * head.positions[t])
                        pair.append((keys[t, :half] + 1j * keys[t, half:]) * turn)
                    square += float(np.sum(np.abs(pair[1] - pair[0]) ** 2))
                lag = layers[0][0].positions[text[i]] - layers[0][0].positions[text[i - 1]]
                total += weight * math.sqrt(square) / math.sqrt(lag)
        jumps.append(total)
    found = [0.0] * len(text)
    for i, t in enumerate(text):
        recent = jumps[max(i - 63, 0) : i + 1]
        spread = float(np.std(recent))
        found[t] = (jumps[i] - float(np.mean(recent))) / spread if spread > 1e-6 * max(map(abs, recent)) else 0.0
    return [[found] * len(heads) for heads in layers]


def infinigen(layers: list[list[Head]]) -> Scores:
    found = []
    for heads in layers:
        logits = []  # of each head: [r][w][t]
        for head in heads:
            keys, queries = f(head.keys), f(head.queries)
            skew = np.linalg.svd(keys)[2].T
            energy = np.abs(keys @ skew).mean(0) + np.abs(queries @ skew).mean((0, 1))
            column = skew[:, int(np.argmax(energy))]  # a tenth of 8 dims: one
            window = range(queries.shape[1])
            visible = [[sees(head, w, len(window), t) for t in range(len(keys))] for w in window]
            part = (queries @ column)[..., None] * (keys @ column) / math.sqrt(len(column))
            logits.append(np.where(visible, part, -math.inf))
        counts = [[0.0] * len(head.positions) for head in heads]
        for w in range(len(logits[0][0])):
            near = [
                sum(x > -math.inf and x >= max(of_head[w]) - 5 for x in of_head[w]) for one in logits for of_head in one
            ]
            for one, count in zip(logits, counts, strict=True):
                fetched = min(max(int(sum(near) / len(near)), 1), max(1, int(0.2 * len(count))))
                for of_head in one:
                    ranking = sorted(range(len(count)), key=lambda t: (-single(of_head[w][t]), t))
                    for t in ranking[:fetched]:
                        count[t] += of_head[w][t] > -math.inf
        found.append(counts)
    return found


# ---------------------------------------------------------------------------------- policies that are more than a score


def logdet_head(head: Head, budget: int, rule: Rule, block: int = 64) -> list[int]:
    keys, first = f(head.keys), pins(head, rule)
    if budget <= len(first):
        return sorted(first[:budget])
    ridge = 0.01 * float(sum(k @ k for k in keys)) / keys.shape[1] or 1.0

    def by_loss(rows: list[int], stays: list[int]) -> list[int]:
        """By 1 - det(G without the row) / det G, ties from the last row on."""
        gram = ridge * np.eye(keys.shape[1]) + sum(np.outer(keys[t], keys[t]) for t in stays)
        whole = np.linalg.slogdet(gram)[1]
        without = {t: np.linalg.slogdet(gram - np.outer(keys[t], keys[t]))[1] for t in rows}
        return sorted(rows, key=lambda t: (single(1 - math.exp(without[t] - whole)), -t))

    stays = list(range(len(keys)))
    while len(stays) > budget:
        low = by_loss([t for t in stays if t not in first], stays)[: 2 * block]
        for _ in range(min(len(stays) - budget, block)):
            least, *low = by_loss(low, stays)
            stays.remove(least)
    return stays


def pyramidkv(layers: list[list[Head]], budget: int, rule: Rule) -> list[list[list[int]]]:
    num_layers = len(layers)
    rows_of = [len(head.positions) for heads in layers for head in heads]
    rows = max(rows_of)
    guard = max(len(pins(head, rule)) for heads in layers for head in heads)
    low = budget / 20
    high = 2 * budget - low
    if high >= rows - guard:
        high = rows - guard
        low = 2 * budget - high
    fits = num_layers > 1 and rows >= high >= low >= guard
    falling = [round(high - a * (high - low) / (num_layers - 1)) if fits else budget for a in range(num_layers)]
    given = [min(falling[a], len(head.positions)) for a, heads in enumerate(layers) for head in heads]
    least = [min(len(pins(head, rule)), budget) for heads in layers for head in heads]
    left = iter(brought_to(given, least, rows_of, min(len(rows_of) * budget, sum(rows_of))))
    return [[sorted(order(head, snapkv(head, rule), rule)[: next(left)]) for head in heads] for heads in layers]


def brought_to(given: list[int], least: list[int], most: list[int], total: int) -> list[int]:
    """A row a head at a time: added from the first head on, taken from the last."""
    while sum(given) != total:
        more = sum(given) < total
        for i in range(len(given)) if more else range(len(given))[::-1]:
            room = given[i] < most[i] if more else given[i] > least[i]
            if room and sum(given) != total:
                given[i] += 1 if more else -1
    return given


def adakv_layer(heads: list[Head], budget: int, rule: Rule, share: float = 0.2) -> list[list[int]]:
    scores = [adakv_head(head, rule) for head in heads]
    orders = [order(head, score, rule) for head, score in zip(heads, scores, strict=True)]
    num_rows = [len(rows) for rows in orders]
    even = [min(budget, rows) for rows in num_rows]
    first = [min(len(pins(head, rule)), even[b]) for b, head in enumerate(heads)]
    floor = [int(share * (even[b] - first[b])) for b in range(len(heads))]
    offers = []
    for b, rows in enumerate(orders):
        free = [scores[b][t] for t in rows[first[b] :]]
        share_kept = sum(free[: even[b] - first[b]]) / sum(free) if sum(free) else 1
        offers += [(-single(value * share_kept), b) for value in free]
    total = min(len(heads) * budget, sum(num_rows))
    owners = [b for _, b in sorted(offers)[: total - sum(first)]]
    wanted = [first[b] + round(owners.count(b) * (1 - share) + floor[b]) for b in range(len(heads))]
    wanted = [min(rows, most) for rows, most in zip(wanted, num_rows, strict=True)]
    given = brought_to(wanted, [x + y for x, y in zip(first, floor, strict=True)], num_rows, total)
    return [sorted(rows[: given[b]]) for b, rows in enumerate(orders)]


def nacl_head(head: Head, layer: int, kv_head: int, budget: int, rule: Rule) -> list[int]:
    a, rows = f(head.window), len(head.positions)
    proxies = range(a.shape[1])[-min(max(1, head.length // 100), 64) :]
    score = [float(sum(a[r, w, t] for r in range(len(a)) for w in proxies)) / len(a) for t in range(rows)]
    ranking = order(head, score, rule)
    free = max(min(budget, rows) - len(pins(head, rule)), 0)
    drawn = free * 7 // 19
    kept = ranking[: min(budget, rows) - drawn]
    others = sorted(set(range(rows)) - set(kept))
    noisy = {t: score[t] - math.log(-math.log(uniform(rule, layer, kv_head, int(head.positions[t])))) for t in others}
    return sorted(kept + sorted(others, key=lambda t: (-single(noisy[t]), t))[:drawn])


def kv_compress_window(head: Head) -> list[float]:
    a, text = f(head.window), text_order(head)
    found = [0.0] * len(text)
    for r in range(len(a)):
        squares = [float(sum(a[r, w, t] ** 2 for w in range(a.shape[1]))) for t in text]
        for i, t in enumerate(text):
            found[t] += max(near(squares, i, 3))
    return found


def kv_compress_full(head: Head) -> list[float]:
    return over_queries(head.squares)


def kv_compress(layers: list[list[Head]], budget: int, rule: Rule, score: Any) -> list[list[list[int]]]:
    """Blocks of 16 freed one at a time, each time the cheapest that any head could free next: pinned rows only where
    there are no others, rows that free no block only where no block is left."""
    heads = [head for of_layer in layers for head in of_layer]
    scores = [[single(x) for x in score(head)] for head in heads]
    first = [pins(head, rule) for head in heads]
    kept = [order(head, score, rule) for head, score in zip(heads, scores, strict=True)]  # the last goes next
    safe = [min(len(first[i]), budget, len(heads[i].positions)) for i in range(len(heads))]
    over = max(sum(map(len, kept)) - len(heads) * budget, 0)
    while over:
        offers = []
        for i, rows in enumerate(kept):
            block = (len(rows) - 1) % 16 + 1
            size = min(block, len(rows) - safe[i])
            if size:
                dearest = rows[-size]
                offers.append((dearest in first[i], size < block, scores[i][dearest], -i, size))
        *_, place, size = min(offers)
        gone = min(size, over)
        del kept[-place][-gone:]
        over -= gone
    rows_of = iter(kept)
    return [[sorted(next(rows_of)) for _ in of_layer] for of_layer in layers]


# --------------------------------------------------------------------------------------------------------- every policy

_OF_HEAD = (streaming, h2o, scissorhands, snapkv, keydiff, rkv, rswa, oracle)
OF_HEAD = {score.__name__: score for score in _OF_HEAD}
OF_LAYERS = {"tova": tova, "triattention": triattention, "epikv": epikv, "infinigen": infinigen}
SEEDED = {"random": random, "nexus": nexus}


def expected(name: str, layers: list[list[Head]], budget: int, rule: Rule) -> list[list[list[int]]]:
    """The rows that a policy must keep, ascending, [L][H]."""
    if name in OF_HEAD:
        return by_scores(layers, [[OF_HEAD[name](head, rule) for head in heads] for heads in layers], budget, rule)
    if name in OF_LAYERS:
        return by_scores(layers, OF_LAYERS[name](layers), budget, rule)
    if name in SEEDED:
        return by_scores(layers, SEEDED[name](layers, rule), budget, rule)
    if name == "logdet":
        return [[logdet_head(head, budget, rule) for head in heads] for heads in layers]
    if name == "adakv":
        return [adakv_layer(heads, budget, rule) for heads in layers]
    if name == "nacl":
        return [[nacl_head(head, a, b, budget, rule) for b, head in enumerate(x)] for a, x in enumerate(layers)]
    if name == "pyramidkv":
        return pyramidkv(layers, budget, rule)
    score = {"kv-compress": kv_compress_window, "kv-compress-full": kv_compress_full}[name]
    return kv_compress(layers, budget, rule, score)
