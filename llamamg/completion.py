"""From sampled tokens to events: text, limits, stop reasons and timings of each sequence."""

from __future__ import annotations

from collections.abc import Callable

from llamamg.batch import Row
from llamamg.kvcache import KVCache
from llamamg.request import Delta, Event, Finished, FinishReason, Progress, Request, Timings, TokenProb
from llamamg.runner import Output
from llamamg.sequence import Sequence, SequenceState
from llamamg.slot import Slot, SlotView
from llamamg.stats import ItlWindow, Stats
from llamamg.vocab import Vocabulary


class Completion:
    """Turns what the runner sampled into what clients see. Fills `outbox` with (request id, event) pairs."""

    def __init__(
        self,
        vocab: Vocabulary,
        kv: KVCache,
        stats: Stats,
        *,
        n_ctx_slot: int,
        context_shift: bool,
        special: bool,
        finished: Callable[[Request, Timings], None],
    ) -> None:
        self.outbox: list[tuple[int, Event]] = []
        self.n_ctx_slot, self.n_vocab = n_ctx_slot, vocab.n_vocab
        self._vocab, self._kv, self._stats = vocab, kv, stats
        self._context_shift = context_shift and kv.can_shift
        self._special = special
        self._finished = finished
        self._tokens: dict[int, list[int]] = {}  # request id -> all generated tokens, where the client wants them
        self._probs: dict[int, list[TokenProb]] = {}

    def prompt_advanced(self, row: Row, now: float) -> None:
        """Prompt tokens of a sequence were computed."""
        sequence = row.sequence
        sequence.timings.prompt_n += len(row)
        self._stats.n_prompt_tokens += len(row)
        sequence.timings.prompt_ms = 1e3 * (now - sequence.t_start)
        if sequence.request.return_progress:
            self.progress(sequence)

    def progress(self, sequence: Sequence) -> None:
        """Tell how far the prompt is."""
        t, request = sequence.timings, sequence.request
        timings = _copy(t) if request.timings_per_token else None
        done = t.cache_n + t.prompt_n
        self.outbox.append((request.id, Progress(sequence.n_prompt, t.cache_n, done, t.prompt_ms, timings)))

    def tokens(self, sequence: Sequence, output: Output, now: float, itl: ItlWindow) -> FinishReason | None:
        """Add an output's tokens; the reason when the sequence ends with them (its Finished is in the outbox then)."""
        self._measure(sequence, now, itl)
        reason: FinishReason | None = None
        text, n_used = "", 0
        for token in output.tokens:
            sequence.n_decoded += 1
            sequence.last_token = token
            n_used += 1
            sent = sequence.text.push(self._piece(sequence, token))
            text += sent
            n_held = len(sequence.slot.tokens) - len(output.tokens) + n_used
            reason = self._end(sequence, token, now, sent, n_held)
            if reason is not None:
                break
        request, n_unused = sequence.request, len(output.tokens) - n_used
        sequence.timings.predicted_n = sequence.n_decoded
        self._stats.n_predicted += n_used
        if n_unused:
            # Accepted draft tokens behind the end are in the cache; the slot must not claim them.
            sequence.slot.tokens.keep(len(sequence.slot.tokens) - n_unused)
        if request.return_tokens:
            self._tokens.setdefault(request.id, []).extend(output.tokens[:n_used])
        probs = tuple(output.probs[:n_used])
        if probs:
            self._probs.setdefault(request.id, []).extend(probs)
        if request.stream and (reason is None or text or probs):
            timings = _copy(sequence.timings) if request.timings_per_token else None
            delta = Delta(text, tuple(output.tokens[:n_used]), sequence.n_decoded, probs, timings)
            self.outbox.append((request.id, delta))
        if reason is not None:
            self.finish(sequence, reason)
        return reason

    def before_end(self, draft: list[int]) -> list[int]:
        """A draft up to its first end of text: nothing is sampled behind that, least of all by a grammar that has ended."""
        n = next((i for i, token in enumerate(draft) if self._vocab.is_eog(token)), len(draft))
        return draft[:n]

    def _piece(self, sequence: Sequence, token: int) -> bytes:
        return self._vocab.piece(token, self._special or token in sequence.request.preserved_tokens)

    def _measure(self, sequence: Sequence, now: float, itl: ItlWindow) -> None:
        t, stats = sequence.timings, self._stats
        if sequence.state is SequenceState.PREFILL:
            sequence.state = SequenceState.DECODE
            sequence.t_prompt = sequence.t_last = now
            t.prompt_ms = 1e3 * (now - sequence.t_start)
            t.ttft_ms = 1e3 * (now - sequence.request.arrival)
            stats.prompt_s += now - sequence.t_start
            stats.ttft.observe(now - sequence.request.arrival)
            stats.queue.observe(max(0.0, t.queue_ms / 1e3))
            stats.prefill.observe(now - sequence.t_start)
            return
        gap = now - sequence.t_last
        sequence.t_last = now
        stats.predicted_s += gap
        stats.itl.observe(gap)
        itl.add(gap)
        t.gaps_s.append(gap)
        t.predicted_ms = 1e3 * (now - sequence.t_prompt)

    def _end(self, sequence: Sequence, token: int, now: float, sent: str, n_held: int) -> FinishReason | None:
        """Why the sequence ends with `token`, if it does: it let `sent` out, and `n_held` tokens were cached before it."""
        request, text = sequence.request, sequence.text
        if text.stopped:
            return FinishReason.WORD
        is_full = n_held + 1 >= self.n_ctx_slot
        if is_full and not self._context_shift:
            sequence.truncated = True
        if self._vocab.is_eog(token):
            return FinishReason.EOS
        if sequence.n_predict >= 0 and sequence.n_decoded >= sequence.n_predict:
            return FinishReason.LIMIT
        over_time = request.t_max_predict_ms > 0 and 1e3 * (now - sequence.t_prompt) > request.t_max_predict_ms
        if over_time and "\n" in sent:  # a line is never cut
            return FinishReason.LIMIT
        if request.n_indent > 0 and text.has_new_line and _indent_broken(text.text, request.n_indent):
            return FinishReason.LIMIT
        if is_full and not self._shift(sequence):
            sequence.truncated = True
            return FinishReason.LIMIT
        return None

    def _shift(self, sequence: Sequence) -> bool:
        """Make room by forgetting the older half behind the kept beginning; False when that is off or impossible."""
        if not self._context_shift:
            return False
        slot, request = sequence.slot, sequence.request
        n_tokens = len(slot.tokens)
        n_keep = sequence.n_prompt if request.n_keep < 0 else request.n_keep
        n_keep = min(self.n_ctx_slot - 4, n_keep + (1 if self._vocab.add_bos else 0))
        n_left = n_tokens - n_keep
        n_discard = min(max(request.n_discard or n_left // 2, 0), max(0, n_left - 1))
        if n_discard == 0:
            return False
        self._kv.remove(slot.seq_id, n_keep, n_keep + n_discard)
        self._kv.shift(slot.seq_id, n_keep + n_discard, n_tokens, -n_discard)
        slot.tokens.discard(n_keep, n_discard)
        slot.checkpoints = []
        sequence.n_past = len(slot.tokens)
        sequence.truncated = True
        return True

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Put the Finished event into the outbox."""
        request, text = sequence.request, sequence.text
        tail = text.flush() if reason is not FinishReason.WORD else ""
        self._stats.n_tokens_max = max(self._stats.n_tokens_max, len(sequence.slot.tokens))
        self.outbox.append(
            (
                request.id,
                Finished(
                    reason=reason,
                    text=text.text,
                    tail=tail,
                    tokens=tuple(self._tokens.get(request.id, ())),
                    n_prompt=sequence.n_prompt,
                    n_decoded=sequence.n_decoded,
                    n_cached_slot=len(sequence.slot.tokens),
                    id_slot=sequence.slot.id,
                    timings=sequence.timings,
                    stopping_word=text.stopping_word,
                    truncated=sequence.truncated,
                    has_new_line=text.has_new_line,
                    probs=tuple(self._probs.get(request.id, ())),
                ),
            )
        )

    def closed(self, sequence: Sequence) -> None:
        """A sequence is out of its slot: give its native sampler and buffers back."""
        sequence.sampler.close()
        self._tokens.pop(sequence.request.id, None)
        self._probs.pop(sequence.request.id, None)
        self._finished(sequence.request, sequence.timings)

    def dropped(self, request: Request) -> None:
        """A request left the queue without running."""
        self._finished(request, Timings())

    def view(self, slot: Slot) -> SlotView:
        """A slot as /slots shows it."""
        sequence = slot.sequence
        if sequence is None:
            idle = slot.last or SlotView(slot.id, self.n_ctx_slot, False)
            idle.n_tokens = len(slot.tokens)
            return idle
        t, live = sequence.timings, sequence.finish is None
        return SlotView(
            id=slot.id,
            n_ctx=self.n_ctx_slot,
            is_processing=live,
            id_task=sequence.request.id,
            n_prompt_tokens=sequence.n_prompt,
            n_prompt_processed=t.prompt_n,
            n_prompt_cached=t.cache_n,
            n_decoded=sequence.n_decoded,
            n_remain=sequence.n_predict - sequence.n_decoded if sequence.n_predict >= 0 else -1,
            has_next_token=live,
            has_new_line=sequence.text.has_new_line,
            n_tokens=len(slot.tokens),
            params=sequence.request.echo_settings,
        )


def _copy(t: Timings) -> Timings:
    return Timings(
        t.cache_n,
        t.prompt_n,
        t.prompt_ms,
        t.predicted_n,
        t.predicted_ms,
        t.queue_ms,
        t.ttft_ms,
        t.draft_n,
        t.draft_n_accepted,
    )


def _indent_broken(text: str, n_indent: int) -> bool:
    """Whether a line after the first begins its text with less than `n_indent` blanks (infill clients ask for that)."""
    lines = text.split("\n")[1:]
    for i, line in enumerate(lines):
        n_blanks = len(line) - len(line.lstrip(" \t"))
        is_begun = n_blanks < len(line) or i < len(lines) - 1
        if is_begun and n_blanks < n_indent:
            return True
    return False
