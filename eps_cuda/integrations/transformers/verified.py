"""Verified decoding in transformers: sparse steps draft, the model's own dense attention decides, both over one cache.

`generate` takes a decoding loop of the caller's (`custom_generate`), and hands it processors, criteria and cache as to
its own `_sample`. Its assisted decoding has no place for this: an assistant there has a cache of its own, which it
prefills, and drawn drafts are accepted by rejection. Here drafts and verdicts take the same random numbers, those that
`_sample` would take, so that the text is the dense one of the same seed.
"""

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode

from eps_core.errors import require
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.verified import Rounds
from eps_cuda.integrations.transformers.cache import EpsLayer, is_fresh
from eps_cuda.integrations.transformers.names import CACHE, cache_in
from eps_cuda.integrations.transformers.rows import Rows

# processors that keep what they have seen, which drafts must not become part of
_GUIDED = ("UnbatchedClassifierFreeGuidanceLogitsProcessor",)  # in a cache of its own
_COUNTING = ("SynthIDTextWatermarkLogitsProcessor",)
_PLAIN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@contextmanager
def verifying(model: Any, sparse: SparseAttention) -> Iterator[None]:
    """Inside, what `model.generate` says of one prompt, greedily or drawn, is drafted and verified. Batches are decoded
    densely; beams, assistants and loops of the caller's are as they were, over dense steps."""
    own, stock = model.__dict__.get("generate"), model.generate
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def generate(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind_partial(*args, **kwargs).arguments
        named.update(named.pop("kwargs", {}))
        config = _plain_config(model, named) if sparse.on else None
        if config is not None:
            assert sparse.rounds is not None
            more: list[Any] = []
            if config.stop_strings is not None and named.get("tokenizer") is not None:
                # transformers makes none for a custom loop, as it keeps the tokenizer from it
                more = [StopStringCriteria(named["tokenizer"], config.stop_strings)]
                kwargs["stop_strings"] = None
            kwargs["custom_generate"] = _loop(sparse, sparse.rounds, named.get("streamer"), more)
        return stock(*args, **kwargs)

    model.generate = generate
    try:
        yield
    finally:
        if own is None:
            del model.generate
        else:
            model.generate = own


def _plain_config(model: Any, named: dict[str, Any]) -> GenerationConfig | None:
    """Return the generation config of this call, the model's own included; None where our loop cannot replace the stock
    one."""
    if named.get("custom_generate") is not None or named.get("synced_gpus"):
        return None
    config, _ = model._prepare_generation_config(**{"generation_config": None, **named})
    more = config.output_attentions or config.output_hidden_states or config.token_healing or config.use_cache is False
    plain = config.get_generation_mode(named.get("assistant_model")) in _PLAIN and not more
    return config if plain else None


def _loop(sparse: SparseAttention, rounds: Rounds, streamer: Any, more_criteria: list[Any]) -> Any:
    """Return the loop that `generate` takes as `custom_generate`."""

    def loop(
        model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        stopping_criteria = StoppingCriteriaList([*stopping_criteria, *more_criteria])
        cache: Any = cache_in(model_kwargs)
        # one that `generate` has made becomes ours in its first forward
        ours = cache is not None and (bool(_own_layers(cache)) or is_fresh(cache))
        reasons = {
            "a cache that was made without EPS": not ours,
            "a batch": len(input_ids) > 1,
            "text with a processor that cannot be copied": not _can_draft(logits_processor),
        }
        reason = next((reason for reason, there in reasons.items() if there), None)
        if reason is not None:
            rounds.undrafted(reason)
            return type(model)._sample(
                model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                generation_config=generation_config, streamer=streamer, **model_kwargs,
            )  # fmt: skip
        text = _Text(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer)
        if not text.lacks_one(cache):
            text.begin()
        require(
            getattr(cache, "is_croppable", True),
            "verified decoding takes drafts back, and a layer of this model keeps a state that cannot be: use "
            "--eps-verify off",
        )
        rows = _own_layers(cache)[0].rows
        cache.activate_past_recording()
        try:
            while not text.ended:
                text.round(sparse, rounds, rows, cache)
        except BaseException:
            if rows.round is not None:
                rows.end_round(0)
            for layer in cache.layers:
                if isinstance(layer, EpsLayer):
                    layer.length, layer._waiting = rows.length, None
                else:
                    layer.crop(min(rows.length - layer.get_seq_length(), 0))
            raise
        return text.result(cache)

    return loop


def _keep_state(processor: Any) -> bool:
    """Return whether any processor may keep what it has seen."""
    kinds = map(type, processor)
    return any(one.__name__ in _COUNTING or not one.__module__.startswith("transformers.") for one in kinds)


def _can_draft(processor: Any) -> bool:
    """Return whether drafts can have processors of their own: copies, where these keep a state."""
    if any(type(one).__name__ in _GUIDED for one in processor):
        return False
    try:
        return not _keep_state(processor) or copy.deepcopy(processor) is not None
    except Exception:  # whatever a class of the caller's raises
        return False


def _own_layers(cache: Any) -> list[EpsLayer]:
    return [layer for layer in cache.layers if isinstance(layer, EpsLayer)]


class _Text:
    """One prompt as it is continued."""

    def __init__(
        self, model: Any, ids: Tensor, processor: Any, criteria: Any, config: Any, kwargs: dict[str, Any], streamer: Any
    ) -> None:
        self.model, self.ids, self.processor, self.criteria = model, ids, processor, criteria
        self.config, self.kwargs, self.streamer = config, kwargs, streamer
        self.copies = _keep_state(processor)
        self.ended = False
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []

    def lacks_one(self, cache: Any) -> bool:
        """Return whether the cache holds all of the prompt but its last token."""
        mask = self.kwargs.get("attention_mask")
        whole = getattr(self.config, "_mask_length", -1) if mask is None else mask.shape[1]
        # else the prompt goes on from what the cache holds
        held = cache.get_seq_length()
        return bool(held and whole == self.ids.shape[1] == held + 1)

    def begin(self) -> None:
        """Reads the prompt, and says the first token."""
        outputs = self.model._prefill(self.ids, self.config, self.kwargs)
        self.kwargs = self.model._update_model_kwargs_for_generation(outputs, self.kwargs)
        before = self.ids.shape[1]
        self._say(outputs.logits[:, -1])
        self._stream(before)

    def round(self, sparse: SparseAttention, rounds: Rounds, rows: Rows, cache: Any) -> None:
        """Says one token at least."""
        assert rows.paged is not None
        before = self.ids.shape[1]
        length = rows.length - int(rows.padding[0])
        reason = "error" if rows.broken else rows.odd
        counts = rounds.begin(sparse.config, length, self.config.max_length - before, reason)
        drafts = counts.drafts
        opened = rows.open_round(rows.sequences[0], drafts)
        ids, kwargs = self.ids, self.kwargs
        # the numbers that are drawn from here on are drawn again
        numbers: Any = torch if ids.device.type == "cpu" else torch.get_device_module(ids.device)
        state = numbers.get_rng_state() if self.config.do_sample else None
        processor = copy.deepcopy(self.processor) if drafts and self.copies else self.processor
        for _ in range(drafts):
            outputs = self._forward(ids, kwargs, 1)
            scores = processor(ids, self._row(outputs.logits[:, -1]))
            # a draft may be anything, but drawing from NaN would end the text
            ids = torch.cat([ids, self._drawn(torch.nan_to_num(scores))[:, None]], dim=-1)
            kwargs = self.model._update_model_kwargs_for_generation(outputs, dict(kwargs))
        if drafts:
            cache.crop(-drafts)
            rounds.drafted(counts, rows.paged.cache)
        if state is not None:
            numbers.set_rng_state(state)
        opened.verifying = True
        outputs = self._forward(ids, kwargs, drafts + 1)
        drafted, said, margins, accepted = ids[0, before:].tolist(), list[int](), list[Tensor](), 0
        for row in range(drafts + 1):
            scores = self._say(outputs.logits[:, row - drafts - 1])
            said.append(int(self.ids[0, -1]))
            if state is None:
                margins.append(scores[0].topk(2).values)
            kept = row < drafts and said[-1] == drafted[row]
            accepted += kept
            if self.ended or not kept:
                break
        cache.crop(len(said) - drafts - 1)
        rows.end_round(len(said))
        self.kwargs = self.model._update_model_kwargs_for_generation(outputs, self.kwargs, num_new_tokens=len(said))
        found = torch.stack(margins).tolist() if margins else []
        rounds.end(counts, rows.paged.cache, said, accepted, [best - next_ for best, next_ in found])
        self._stream(before)

    def result(self, cache: Any) -> Any:
        """Return the result of `generate`."""
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return self.ids
        found: dict[str, Any] = {"sequences": self.ids, CACHE: cache}
        found["scores"] = tuple(self.scores) if self.config.output_scores else None
        found["logits"] = tuple(self.logits) if self.config.output_logits else None
        return GenerateDecoderOnlyOutput(**found)

    def _forward(self, ids: Tensor, kwargs: dict[str, Any], num_new: int) -> Any:
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=num_new, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_new
        return self.model(**inputs, return_dict=True)

    def _say(self, logits: Tensor) -> Tensor:
        """Adds the token that `_sample` would, of logits [1, V]; its scores [1, V]."""
        logits = self._row(logits)
        scores: Tensor = self.processor(self.ids, logits)
        if self.config.return_dict_in_generate:
            self.scores += [scores] if self.config.output_scores else []
            self.logits += [logits] if self.config.output_logits else []
        self.ids = torch.cat([self.ids, self._drawn(scores)[:, None]], dim=-1)
        self.ended = bool(self.criteria(self.ids, tuple(self.scores) or None).all())
        return scores

    def _row(self, logits: Tensor) -> Tensor:
        return logits.to(copy=True, dtype=torch.float32, device=self.ids.device)

    def _drawn(self, scores: Tensor) -> Tensor:
        """Token [1] of scores [1, V], as `_sample` has it."""
        if self.config.do_sample:
            return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        return scores.argmax(dim=-1)

    def _stream(self, before: int) -> None:
        if self.streamer is not None:
            self.streamer.put(self.ids[:, before:].cpu())
