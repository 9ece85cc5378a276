"""The least that computing a ubatch takes on one device: a lower bound of libllama's compute buffer.

Counted is what must be there at the same time, whatever the allocator does: activations, and the larger of the logits
and the largest step of attention with its inputs, which come one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from llamamg.config import ContextConfig
from llamamg.memory_shape import LayerShapes
from llamamg.model import n_slots
from llamamg.modelfile import ModelHeader

_F32, _F16 = 4, 2
_SELECT_ROWS, _SELECT_BINS = 64, 2048  # tokens that share the workspace of native QSA's selection, and its histogram


class GraphMemory:
    """Bytes of the parts, for a device that computes these layers. `n_cells` is the context of one stream."""

    def __init__(
        self, c: ContextConfig, header: ModelHeader, layers: Iterable[int], n_cells: int, native_qsa: bool
    ) -> None:
        shapes = LayerShapes(header)
        widths = (t.shape[1] for t in header.tensors if t.name in ("token_embd.weight", "output.weight"))
        n_outputs = c.n_outputs_max or min(n_slots(c) * (1 + c.n_draft_max), c.n_batch)
        n_tokens = min(c.n_ubatch, c.n_batch)
        attending = [layer for layer in layers if shapes.has_attention(layer)]
        sparse = [layer for layer in attending if shapes.n_pooled(layer)]
        native = native_qsa and bool(sparse)

        self.logits = n_outputs * max(widths, default=0) * _F32
        self.activations = 2 * n_tokens * int(header.get("embedding_length", 0)) * _F32
        self.inputs = 0  # with several devices and pipeline parallelism libllama keeps up to four copies of these
        self.attention = 0
        if native:
            self.attention = max(_selection(shapes, layer, n_tokens, n_cells) for layer in sparse)
            return
        if attending:
            self.inputs += _F16 * n_tokens * n_cells  # the mask
        if sparse:  # upstream: a bias per block; the scores of all cells as they were gathered, and transposed
            self.inputs += max(_F32 * n_tokens * (n_cells // shapes.ratio(layer)) for layer in sparse)
            self.attention = 2 * _F32 * n_tokens * n_cells

    def total(self, has_logits: bool) -> int:
        """All of it, with or without the logits."""
        return self.activations + max(self.inputs + self.attention, self.logits if has_logits else 0)


def _selection(shapes: LayerShapes, layer: int, n_tokens: int, n_cells: int) -> int:
    """Native QSA: lists of blocks for all tokens, scores and a histogram for a few at a time."""
    n_blocks = n_cells // shapes.ratio(layer)
    return _F32 * (shapes.n_top(layer) * n_tokens + min(n_tokens, _SELECT_ROWS) * (n_blocks + _SELECT_BINS))
