"""From tokens to text a client may see: whole UTF-8 characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs

_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The generated text of one sequence. `push` returns what may go out now; the rest is held back."""

    __slots__ = ("_decode", "_first", "_held", "_parts", "_stops", "has_new_line", "stopping_word")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._stops = tuple(s for s in stops if s)
        # The first characters, so that most text passes without a look at every stop string.
        self._first = frozenset(s[0] for s in self._stops)
        self._decode = _decoder("replace").decode
        self._held = ""  # decoded, but it may be the beginning of a stop string
        self._parts: list[str] = []  # everything sent
        self.stopping_word = ""
        self.has_new_line = False

    @property
    def text(self) -> str:
        """All text sent so far."""
        return "".join(self._parts)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return bool(self.stopping_word)

    def push(self, piece: bytes) -> str:
        """Add a token's bytes; the text that is now certain. After a stop string was found it ends before that string."""
        text = self._decode(piece)
        if self._stops:
            text = self._hold(text)
        return self._send(text)

    def flush(self) -> str:
        """The end of generation: text held back goes out; bytes of an unfinished character are dropped."""
        held, self._held = self._held, ""
        return self._send(held)

    def _send(self, text: str) -> str:
        if text:
            self._parts.append(text)
            if not self.has_new_line and "\n" in text:
                self.has_new_line = True
        return text

    def _hold(self, text: str) -> str:
        text = self._held + text
        if not text or self._first.isdisjoint(text):
            self._held = ""
            return text
        found, word = min(
            ((at, s) for s in self._stops if (at := text.find(s)) >= 0),
            key=lambda hit: (hit[0], -len(hit[1])),
            default=(-1, ""),
        )
        if found >= 0:
            self.stopping_word, self._held = word, ""
            return text[:found]
        keep = max((_overlap(text, s) for s in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
