"""How long a step takes, learned while it runs: a least-squares fit that forgets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KNEE = 64  # prompt tokens after which every expert of a mixture is read anyway and a token costs arithmetic only
UNIT = 1e5  # depths are counted in this many tokens, so that all features are of one size
FORGET = 0.99  # weight of the past per observation: about the last hundred count
PULL = 1e-3  # how strongly a direction without new data is held where it was: a chunk that stays the same says no slope
N_ENOUGH = 4  # observations with prompt tokens before a prediction is worth anything
N_FEATURES = 9


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computed: decode rows, prompt tokens, and how far into their sequences (tokens)."""

    n_rows: int
    n_chunk: int
    prompt_depth: float = 0.0  # mean position of the prompt tokens
    decode_depth: float = 0.0  # sum of the positions of the decode rows
    is_new: bool = False  # another chunk than in the step before, so no graph is there to be used again


class StepFit:
    """t = a + b rows + c ubatches + d chunk + e min(chunk, 64) + f chunk depth + g depth of the decoders + h any + i new.

    The terms: weights read once per ubatch, attention of the decoders, arithmetic and attention of the prompt; what a step
    pays for having prompt tokens at all (seconds, however few: another graph, a ubatch more), and for a chunk of another
    size than the one before. The two slopes in `chunk` stand for a mixture of experts, where the first tokens of a chunk
    each read other experts.
    """

    def __init__(self, n_ubatch: int) -> None:
        self._n_ubatch = max(n_ubatch, 1)
        self._a = np.zeros((N_FEATURES, N_FEATURES))
        self._b = np.zeros(N_FEATURES)
        self._weights = np.zeros(N_FEATURES)
        self._excess = 0.0  # 95 % of the steps take less than this much above the fit, as a fraction
        self._was_odd = False
        self.n_seen = 0  # observations with prompt tokens and decode rows
        self.n_largest = 0  # largest chunk among them: predictions far above it are guesses

    def add(self, shape: StepShape, elapsed_s: float) -> None:
        """Learn from one step. One that took three times the prediction is a hiccup of the machine, two are not."""
        x = self._features(shape, np.array([shape.n_chunk]))[0]
        if self.ready:
            predicted = max(float(x @ self._weights), 1e-6)
            ratio = elapsed_s / predicted
            # Steps of a running quantile: up by 19 parts when above, down by one when below.
            self._excess = min(0.5, max(0.0, self._excess + (0.019 if ratio > 1 + self._excess else -0.001)))
            self._was_odd = ratio > 3 and not self._was_odd
            if self._was_odd:
                return
        self._a *= FORGET
        self._b *= FORGET
        self._a += np.outer(x, x)
        self._b += x * elapsed_s
        pull = PULL * self._a.diagonal() + 1e-12  # in each feature's own size: c times depth is a small number
        self._weights = np.linalg.solve(self._a + np.diag(pull), self._b + pull * self._weights)
        if shape.n_chunk and shape.n_rows:
            self.n_seen += 1
            self.n_largest = max(self.n_largest, shape.n_chunk)

    @property
    def ready(self) -> bool:
        """Whether predictions mean something."""
        return self.n_seen >= N_ENOUGH

    @property
    def excess(self) -> float:
        """How far the slowest twentieth of the steps lies above the fit, as a fraction."""
        return self._excess

    def predict(self, shape: StepShape, chunks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds for each of `chunks` prompt tokens in a step that is otherwise like `shape`, once that chunk is usual."""
        return np.maximum(self._features(shape, chunks) @ self._weights, 1e-6)

    def _features(self, shape: StepShape, chunks: NDArray[np.int64]) -> NDArray[np.float64]:
        c = chunks.astype(np.float64)
        x = np.empty((len(c), N_FEATURES))
        x[:, 0] = 1.0
        x[:, 1] = shape.n_rows
        x[:, 2] = np.ceil((c + shape.n_rows) / self._n_ubatch)
        x[:, 3] = c / 512.0
        x[:, 4] = np.minimum(c, KNEE) / KNEE
        x[:, 5] = c / 512.0 * (shape.prompt_depth / UNIT)
        x[:, 6] = shape.decode_depth / UNIT
        x[:, 7] = c > 0
        x[:, 8] = shape.is_new
        return x
