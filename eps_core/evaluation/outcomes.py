"""Both sides of one `eps-proto run`, dense and sparse, whatever decoded them: a table and the last line's object."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.evaluation.pays import PaysFrom, slower_note
from eps_core.evaluation.runner import Outcome
from eps_core.metrics import terminal


@dataclass(frozen=True)
class Ran:
    """The fields that both sides share."""

    identity: dict[str, Any]  # how the last line names it: backend, device, model, ..
    config: EpsConfig
    prompt_lengths: list[int]
    answer: str | None  # of the built-in needle document; None also where too few tokens were asked for
    verify: SpeculativeConfig = SpeculativeConfig()  # noqa: RUF009  of the EPS side
    labels: tuple[str, str] = ("dense", "EPS")  # what the two sides are called
    pays: PaysFrom | None = None  # see `pays.timing`
    watched: bool = False  # for a page every layer was called by itself, on both sides
    sparse_layers_of: str | None = (
        None  # where an engine leaves layers dense: how many are sparse, of which bytes speak
    )
    of_model: float | None = None  # .. and bytes read over dense of the whole model's KV reads


@dataclass(frozen=True)
class Parting:
    """Where a text first is another than dense decoding's, and how close the two best tokens were there: see
    `decode.sampling.Drawn`. Behind it both go their own ways."""

    prompt: int
    token: int  # index among the new ones
    dense_margin: float | None
    verified_margin: float | None


def partings(dense: Outcome, sparse: Outcome) -> list[Parting]:
    """Return the parting of every prompt that is continued otherwise than densely."""
    margins: list[dict[int, list[float]]] = [{}, {}]
    for by_prompt, side in zip(margins, (dense, sparse), strict=True):
        for prompt, _, margin in side.margins:
            by_prompt.setdefault(prompt, []).append(margin)
    found = []
    for prompt, (a, b) in enumerate(zip(dense.tokens, sparse.tokens, strict=True)):
        if a != b:
            pairs = enumerate(zip(a, b, strict=False))
            at = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
            own = [by_prompt[prompt][at] if at < len(by_prompt.get(prompt, ())) else None for by_prompt in margins]
            found.append(Parting(prompt, at, *own))
    return found


def prompt_line(lengths: Sequence[int], answer: str | None) -> str:
    """Return the header's line about the prompts."""
    if len(lengths) > 1:
        return f"prompts {len(lengths)} of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} in all\n"
    kind = "" if answer is None else f", a needle document whose answer is {answer}"
    return f"prompt  {lengths[0]:,} tokens{kind}\n"


def alike(dense: Outcome | None, sparse: Outcome | None) -> list[bool] | None:
    """Return whether both sides said the same, of each prompt; None where one did not run."""
    if dense is None or sparse is None:
        return None
    return [a == b for a, b in zip(sparse.tokens, dense.tokens, strict=True)]


def summary_line(
    prompt_lengths: Sequence[int], dense: Outcome | None, sparse: Outcome | None, more: dict[str, Any]
) -> dict[str, Any]:
    """The last line of `--metrics`: of the sparse side, the dense side's in it, or of the one that ran alone; with
    `more` keys."""
    main, same = sparse or dense, alike(dense, sparse)
    assert main is not None
    return {
        "type": "summary",
        **main.summary(),
        "prompt_tokens": sum(prompt_lengths),
        "tokens_equal": None if same is None else all(same),
        "dense": dense.summary() if dense is not None and sparse is not None else None,
        **more,
    }


def report(
    ran: Ran,
    dense: Outcome | None,
    sparse: Outcome | None,
    out: TextIO,
    divergence: dict[str, float | None] | None = None,
    layer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the table to `out`; returns the last line's object. `layer` is one layer of a large model."""
    divergence = divergence or {}
    main, same = sparse or dense, alike(dense, sparse)
    assert main is not None
    alone = len(ran.prompt_lengths) == 1
    checks: list[tuple[str, str | None, str | None]] = []
    if ran.answer is not None:
        answered = [_yes(side.texts[0].startswith(ran.answer)) if side else None for side in (dense, sparse)]
        checks.append(("needle answered", answered[0], answered[1]))
    if same is not None:
        checks.append(
            ("tokens equal to dense", None, _yes(same[0]) if alone else f"{sum(same)} of {len(same)} prompts")
        )
    parted = partings(dense, sparse) if dense and sparse and ran.verify.enabled else []
    for one in parted:
        margins = " and ".join(f"{m:.2g}" for m in (one.dense_margin, one.verified_margin) if m is not None)
        plan = f"  not from new token {one.token + 1}" + ("" if alone else f" of prompt {one.prompt + 1}")
        checks.append((f"{plan} on: nats to the runner-up", None, margins or "-"))
    checks += [
        (name.replace("_", " "), None, f"{value:.5f}") for name, value in divergence.items() if value is not None
    ]
    for name, field, show in (
        ("prompt tokens loaded", "tokens_loaded", "{:,}"), ("time to first token, ms", "ttft_ms", "{:,.0f}"),
    ):  # fmt: skip
        if main.stored:
            shown = [show.format(side.stored[field]) if side and side.stored else None for side in (dense, sparse)]
            checks.append((name, shown[0], shown[1]))
    dense_summary, eps_summary = dense.summary() if dense else None, sparse.summary() if sparse else None
    hybrid = None if ran.sparse_layers_of is None or ran.of_model is None else (ran.sparse_layers_of, ran.of_model)
    # what each side took from stored prompts, where these are kept
    stored = {name: side.stored for name, side in (("dense", dense), ("eps", sparse)) if side and side.stored}
    eps = None
    if sparse and eps_summary:
        verify = ran.verify if ran.verify.enabled else None
        eps = {"label": ran.labels[1], **terminal.outcome_json(_alone(sparse), eps_summary, ran.config, verify)}
    table = terminal.run_table(dense_summary, eps_summary, checks, layer, out, ran.labels, hybrid)
    out.write(f"\n{table}\n")
    if dense_summary and eps_summary:
        paced = ran.verify.draft is None
        note = (
            "layers were called one by one for the page: without it both sides may be faster"
            if ran.watched
            else slower_note(ran.labels[1], max(ran.prompt_lengths), dense_summary, eps_summary, ran.pays, paced)
        )
        out.write("" if note is None else f"note    {note}\n")
    return {
        **ran.identity,
        "prompt_tokens": sum(ran.prompt_lengths),
        "new_tokens": sum(map(len, main.tokens)),
        # of several prompts, `sequences` tells each
        "text": main.texts[0] if alone else None,
        "tokens": _alone(main),
        "tokens_equal": None if same is None else all(same),
        "bytes_ratio": eps_summary["bytes_ratio"] if eps_summary else None,
        "dense": terminal.outcome_json(_alone(dense), dense_summary) if dense and dense_summary else None,
        "eps": eps,
        **({"partings": [asdict(one) for one in parted]} if ran.verify.enabled else {}),
        **divergence,
        **({"stored": stored} if stored else {}),
        **({} if layer is None else {"layer": layer}),
        **({} if alone else {"sequences": _sequences(ran, main, dense, same)}),
    }


def _alone(side: Outcome) -> list[int] | None:
    """The tokens that were said, where one prompt was."""
    return side.tokens[0] if len(side.tokens) == 1 else None


def _sequences(ran: Ran, main: Outcome, dense: Outcome | None, same: list[bool] | None) -> list[dict[str, Any]]:
    """Return, of each prompt of a batch, the fields that a single one has at the top."""
    return [
        {
            "prompt_tokens": length,
            "new_tokens": len(tokens),
            "text": text,
            "tokens": tokens,
            "tokens_equal": None if same is None else same[i],
            "dense_tokens": None if dense is None else dense.tokens[i],
        }
        for i, (length, tokens, text) in enumerate(zip(ran.prompt_lengths, main.tokens, main.texts, strict=True))
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
