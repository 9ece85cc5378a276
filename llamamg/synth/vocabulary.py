"""Find, read and extend the tokenizer that a synthetic model carries."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader, GGUFWriter, TokenType

from llamamg import paths
from llamamg.synth.preset import SynthError

CHAT_START: Final = "<|im_start|>"
CHAT_END: Final = "<|im_end|>"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNUSED_SCORE: Final = -1e4
SPEAKABLE: Final = (TokenType.NORMAL, TokenType.BYTE)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as GGUF stores it; `scores` or `merges` is empty where the tokenizer kind has none."""

    kind: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    special: dict[str, int]

    @property
    def eos(self) -> int:
        return self.special.get("eos", 0)

    def silent(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool[n_vocab]: control and padding tokens, which a synthetic model never says."""
        return ~np.isin(np.asarray(self.types), SPEAKABLE)

    def extended(self, tokens: list[str], token_type: TokenType) -> Vocabulary:
        n_new = len(tokens)
        return replace(
            self,
            tokens=self.tokens + tokens,
            types=self.types + [int(token_type)] * n_new,
            scores=self.scores + [UNUSED_SCORE] * n_new if self.scores else [],
        )

    def write(self, writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(self.kind)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for name, token in self.special.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)


def with_chat_tokens(vocabulary: Vocabulary) -> Vocabulary:
    """Adds the two ChatML markers where they are missing; the end marker becomes the end-of-turn token."""
    missing = [token for token in (CHAT_START, CHAT_END) if token not in vocabulary.tokens]
    grown = vocabulary.extended(missing, TokenType.CONTROL)
    return replace(grown, special=grown.special | {"eot": grown.tokens.index(CHAT_END)})


def padded(vocabulary: Vocabulary, n_vocab_min: int) -> Vocabulary:
    """Grows to `n_vocab_min` tokens, and then to a multiple of 64, with tokens that no text maps to."""
    n_vocab = -(-max(len(vocabulary.tokens), n_vocab_min) // 64) * 64
    if n_vocab_min and n_vocab > n_vocab_min:
        raise SynthError(
            f"the vocabulary has {len(vocabulary.tokens)} tokens and this preset holds {n_vocab_min}: "
            "give a smaller one with --vocab"
        )
    n_pad = n_vocab - len(vocabulary.tokens)
    return vocabulary.extended([f"<unused_{i}>" for i in range(n_pad)], TokenType.UNUSED)


def read_vocabulary(path: Path) -> Vocabulary:
    """The tokenizer of any GGUF; raises `SynthError` when the file has none."""
    try:
        fields = GGUFReader(path).fields
    except FileNotFoundError as error:
        raise SynthError(f"there is no vocabulary file {path}: give an existing GGUF with --vocab") from error
    except (OSError, ValueError) as error:
        raise SynthError(f"{path} cannot be read as GGUF ({error}): give another file with --vocab") from error

    def field(name: str, default: Any = None) -> Any:
        return fields[f"tokenizer.{name}"].contents() if f"tokenizer.{name}" in fields else default

    tokens = field("ggml.tokens")
    if not tokens:
        raise SynthError(f"{path} holds no tokenizer: give a GGUF that has one with --vocab")
    ids = {name: field(f"ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    return Vocabulary(
        kind=field("ggml.model"),
        pre=field("ggml.pre"),
        tokens=tokens,
        types=field("ggml.token_type", [int(TokenType.NORMAL)] * len(tokens)),
        scores=field("ggml.scores", []),
        merges=field("ggml.merges", []),
        special={name: int(token) for name, token in ids.items() if token is not None},
    )


def find_vocabulary(file_name: str, vocab_dir: Path | None = None) -> Path:
    """Where `file_name` lies: in `vocab_dir`, else in the models folder of the pinned llama.cpp tree."""
    folders = [vocab_dir] if vocab_dir is not None else tree_model_dirs()
    for folder in folders:
        if (folder / file_name).is_file():
            return folder / file_name
    looked = ", ".join(str(folder) for folder in folders) or "no folder"
    raise SynthError(
        f"the vocabulary file {file_name} was not found (looked in {looked}): "
        "run `llamamg build`, which unpacks the tree that holds it, or name a GGUF with --vocab"
    )


def tree_model_dirs() -> list[Path]:
    """Candidate `models` folders of the unpacked llama.cpp tree; $LLAMAMG_TREE replaces those of the build."""
    override = os.environ.get("LLAMAMG_TREE")
    roots = [Path(override)] if override else [paths.source("patched"), paths.source("upstream")]
    return [root / folder for root in roots for folder in ("models", "vendor/llama.cpp/models")]
