"""How much each layer of a model remembers per token and per sequence, read from the header of its file."""

from __future__ import annotations

import re

from llamamg.config import ContextConfig
from llamamg.model import n_slots
from llamamg.modelfile import ModelHeader


def padded(n_cells: int) -> int:
    """libllama makes caches in steps of 256 cells."""
    return -(-n_cells // 256) * 256


class LayerShapes:
    """Shapes of the memory of each layer, from metadata and from which tensors a layer has."""

    def __init__(self, header: ModelHeader) -> None:
        self.h = header
        self.n_layer = int(header.get("block_count", 0)) - int(header.get("nextn_predict_layers", 0))
        self.tensors: dict[int, set[str]] = {}
        for tensor in header.tensors:
            if match := re.match(r"blk\.(\d+)\.([\w.]+?)(\.weight|\.bias)?$", tensor.name):
                self.tensors.setdefault(int(match.group(1)), set()).add(match.group(2))

    def _per_layer(self, key: str, layer: int, default: int) -> int:
        value = self.h.get(key, default)
        return int(value[layer] if isinstance(value, list) else value)

    def is_recurrent(self, layer: int) -> bool:
        names = self.tensors.get(layer, set())
        return any(name.startswith(("ssm_conv1d", "shortconv.conv", "time_mix_")) for name in names)

    def has_attention(self, layer: int) -> bool:
        names = self.tensors.get(layer, set())
        fused = "attn_qkv" in names and not self.is_recurrent(layer)  # recurrent layers use the name for another matrix
        return fused or "attn_k" in names or any(name.startswith("attn_kv_") for name in names)

    def n_k(self, layer: int) -> int:
        """Values of one cell's keys."""
        head = int(self.h.get("attention.key_length", 0)) or self._head()
        return head * self._heads(layer)

    def n_v(self, layer: int) -> int:
        """Values of one cell's values; none with multi-head latent attention, whose keys hold both."""
        if self.h.get("attention.key_length_mla"):
            return 0
        return (int(self.h.get("attention.value_length", 0)) or self._head()) * self._heads(layer)

    def n_indexer(self, layer: int) -> int:
        """Values of one cell's indexer key."""
        if not any(name.startswith("indexer") for name in self.tensors.get(layer, set())):
            return 0
        pooled = 3 if self.h.get("attention.indexer.kpool") else 1
        return pooled * int(self.h.get("attention.indexer.key_length", 0))

    def ratio(self, layer: int) -> int:
        """Cells in a block of sparse attention; 0 where a layer has none."""
        ratios = self.h.get("attention.compress_ratios") or ()
        return int(ratios[layer]) if layer < len(ratios) else 0

    def n_top(self, layer: int) -> int:
        """Blocks that sparse attention selects."""
        ratio = self.ratio(layer)
        return int(self.h.get("attention.indexer.top_k", 0)) // ratio if ratio > 0 else 0

    def n_pooled(self, layer: int) -> float:
        """Values of pooled indexer keys for each cell: one F32 key for every block."""
        ratio = self.ratio(layer)
        return self.n_indexer(layer) / ratio if ratio > 0 else 0.0

    def n_state(self, layer: int) -> int:
        """Values of one sequence's recurrent state."""
        g, n_embd = self.h.get, int(self.h.get("embedding_length", 0))
        if head := int(g("wkv.head_size", 0)):
            return int(g("token_shift_count", 2)) * n_embd + n_embd * head
        if n_conv := int(g("shortconv.l_cache", 0)):
            return n_embd * (n_conv - 1)
        inner, state, groups = int(g("ssm.inner_size", 0)), int(g("ssm.state_size", 0)), int(g("ssm.group_count", 0))
        conv = max(0, int(g("ssm.conv_kernel", 0)) - 1)
        if head := int(g("kda.head_dim", 0)):
            inner = head * self._per_layer("attention.head_count", layer, 0)
            return 3 * conv * inner + head * inner
        n_values = conv * (inner + 2 * groups * state) + state * inner
        if layer in (g("ple.layers") or ()):
            n_values += (int(g("ple.conv_kernel", 1)) - 1) * int(g("ple.ngram_size", 0)) * self._streams() * n_embd
        return n_values

    def cells(self, layer: int, n_cells: int, c: ContextConfig, n_streams: int) -> int:
        """Cells of one layer: fewer with a sliding window. Where the file does not say which layers have one, all count."""
        window = int(self.h.get("attention.sliding_window", 0) or 0)
        pattern = self.h.get("attention.sliding_window_pattern")
        if not window or c.swa_full or (isinstance(pattern, list) and not pattern[layer]):
            return n_cells
        if isinstance(pattern, int) and pattern and layer % pattern == pattern - 1:
            return n_cells
        return padded(min(n_cells, window * (n_slots(c) if n_streams == 1 else 1) + c.n_ubatch))

    def _streams(self) -> int:
        return int(self.h.get("hyper_connection.count", 1))

    def _head(self) -> int:
        return int(self.h.get("embedding_length", 0)) // max(1, self._per_layer("attention.head_count", 0, 1))

    def _heads(self, layer: int) -> int:
        return self._per_layer("attention.head_count_kv", layer, self._per_layer("attention.head_count", layer, 1))
