"""Record what an engine does to its context, and repeat exactly that with another build: the same logits, or where not.

A model's answer depends on which tokens are computed together, so two libraries can only be compared under the same
batches. `python -m llamamg.replay FILE --build DIR` replays in a process of its own, since one process holds one build.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llamamg import library as native
from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.kvcache import KVCache
from llamamg.model import describe, load_model, new_context
from llamamg.vocab import Vocabulary

if TYPE_CHECKING:
    from llamamg.batch import Batch
    from llamamg.engine import Engine
    from llamamg.runner import Done

MEMORY_CALLS = ("remove", "copy", "shift", "clear")
Logits = NDArray[np.float32]  # [n_outputs, n_vocab] of one decode


@dataclass(frozen=True, slots=True)
class Difference:
    """An output that is not the recorded one. `margin` is the gap of its two best logits."""

    decode: int  # which decode of the recording
    row: int  # which output of that decode
    token: int  # recorded
    got: int  # best token of the replay
    margin: float


@dataclass(slots=True)
class Recording:
    """The calls in order: ["decode", rows, outputs], a memory call with its arguments, ["save" | "restore", …],
    ["transfer", …]. Several contexts are recorded as one that has all their sequences; an order is kept in each of them.

    rows: [seq_id, pos0, n_logits, tokens]; outputs: [best token, checksum of the logits] for each logits row.
    """

    model: str
    context: dict[str, Any]
    calls: list[list[Any]] = field(default_factory=list)

    @property
    def n_decodes(self) -> int:
        """Decodes recorded."""
        return sum(call[0] == "decode" for call in self.calls)

    def write(self, path: Path) -> None:
        """As lines of JSON: a header, then one call per line."""
        header = {"model": self.model, "context": self.context}
        path.write_text("\n".join(json.dumps(item) for item in [header, *self.calls]) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Recording:
        """What `write` wrote."""
        header, *calls = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        return cls(header["model"], header["context"], calls)


def record(engine: Engine, watch: Callable[[Batch, Logits], None] = lambda batch, logits: None) -> Recording:
    """Record from now on; call it before `engine.start()`. Costs a pass over each logits row.

    `watch` gets each computed batch before it is sampled, with a copy of its logits.
    """
    config, runner, kv = engine.config, engine.runner, engine.scheduler.kv
    recording = Recording(str(config.model.path), dataclasses.asdict(config.context))
    calls = recording.calls
    for name in MEMORY_CALLS:
        setattr(kv, name, _recorded(name, getattr(kv, name), calls))
    _record_states(kv, calls)
    if runner.n_contexts > 1:
        _record_transfers(kv, calls)
    llama, lock = native.load(config.build).llama, threading.Lock()
    for one in getattr(runner, "runners", (runner,)):  # a pool has one for each context
        _record_batches(one, llama, engine.vocab.n_vocab, calls, watch, lock)
    return recording


def _record_batches(
    runner: Any,
    llama: Any,
    n_vocab: int,
    calls: list[list[Any]],
    watch: Callable[[Batch, Logits], None],
    lock: threading.Lock,
) -> None:
    submit, collect = runner.submit, runner.collect
    waiting: list[tuple[Batch, list[Any]]] = []

    def submit_recorded(batch: Batch) -> None:
        rows = [[r.sequence.slot.seq_id, r.pos0, r.n_logits, [int(t) for t in r.tokens]] for r in batch.rows]
        submit(batch)
        waiting.append((batch, rows))

    def collect_recorded() -> Done | None:
        if waiting:
            batch, rows = waiting.pop(0)
            logits = read_logits(llama, runner.context, rows, n_vocab)
            outputs = [list(out[:2]) for out in _outputs(logits)]
            with lock:  # each context has a thread; who watches sees batches in the order of the calls
                calls.append(["decode", rows, outputs])
                watch(batch, logits)
        done: Done | None = collect()
        return done

    runner.submit, runner.collect = submit_recorded, collect_recorded


def _record_transfers(kv: Any, calls: list[list[Any]]) -> None:
    transfer = kv.transfer

    def transfer_recorded(source: int, target: int, swap_bytes_max: int = 0) -> bool:
        call = ["transfer", source, target, False]
        calls.append(call)
        call[3] = bool(transfer(source, target, swap_bytes_max))
        return bool(call[3])

    kv.transfer = transfer_recorded


def _transfer(kv: KVCache, source: int, target: int, is_swapped: bool) -> None:
    """What moved between contexts moves between sequences of one."""
    moved, back = (kv.save(id_, 0) if kv.pos_max(id_) >= 0 else None for id_ in (source, target))
    for id_, data in ((target, moved), (source, back if is_swapped else None)):
        kv.remove(id_, -1, -1)
        if data is not None:
            kv.restore(id_, data, 0)


def _recorded(name: str, function: Any, calls: list[list[Any]]) -> Any:
    def call(*args: int) -> Any:
        calls.append([name, *args])
        return function(*args)

    return call


def _record_states(kv: KVCache, calls: list[list[Any]]) -> None:
    """Snapshots are named by number: a replay makes and restores its own."""
    names: dict[int, int] = {}
    kept: list[Any] = []  # so that no address is used twice
    save, restore = kv.save, kv.restore

    def save_recorded(seq_id: int, flags: int = 1) -> NDArray[np.uint8] | None:
        data = save(seq_id, flags)
        if data is not None:
            names[id(data)] = len(kept)
            kept.append(data)
            calls.append(["save", seq_id, flags, names[id(data)]])
        return data

    def restore_recorded(seq_id: int, data: NDArray[np.uint8], flags: int = 1) -> bool:
        calls.append(["restore", seq_id, flags, names[id(data)]])
        return restore(seq_id, data, flags)

    kv.save, kv.restore = save_recorded, restore_recorded  # type: ignore[method-assign]


def read_logits(llama: Any, context: Any, rows: list[Any], n_vocab: int) -> Logits:
    """A copy of every logits row of the last decode, in the order of `rows`."""
    index: list[int] = []
    end = 0
    for _, _, n_logits, tokens in rows:
        end += len(tokens)
        index += range(end - n_logits, end)
    logits = np.empty((len(index), n_vocab), np.float32)
    for row, i in zip(logits, index, strict=True):
        row[:] = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (n_vocab,))
    return logits


def _outputs(logits: Logits) -> list[tuple[int, int, float]]:
    """(best token, checksum, margin of the two best) of every row."""
    outputs = []
    for row in logits:
        second, best = np.partition(row, -2)[-2:]
        outputs.append((int(row.argmax()), zlib.crc32(row.tobytes()), float(best - second)))
    return outputs


def play(
    recording: Recording, llama: Any, context: Any, kv: KVCache, n_vocab: int
) -> Iterator[tuple[list[Any], Logits]]:
    """Repeat the calls in a context of one's own; yields each decode's recorded call and the logits it gives now."""
    saved: dict[int, Any] = {}
    for call in recording.calls:
        name, *args = call
        if name == "save":
            saved[args[2]] = kv.save(args[0], args[1])
        elif name == "restore":
            kv.restore(args[0], saved[args[2]], args[1])
        elif name == "transfer":
            _transfer(kv, *args)
        elif name != "decode":
            getattr(kv, name)(*args)
        else:
            decode(llama, context, args[0])
            yield call, read_logits(llama, context, args[0], n_vocab)


def replay(recording: Recording, build: Path | None) -> tuple[int, int, list[Difference]]:
    """Repeat a recording with `build`: outputs compared, those with the same bits, and those with another best token."""
    lib = native.load(build)
    context_config: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in recording.context.items()}
    config = Config(ModelConfig(Path(recording.model)), ContextConfig(**context_config))
    model = load_model(lib, config.model)
    vocab = Vocabulary(lib.llama, model)
    info = describe(lib, model, config.model.path, vocab.n_vocab, vocab.type, None)
    context = new_context(lib, model, config)
    kv = KVCache(lib.llama, context, is_recurrent=info.is_recurrent or info.is_hybrid, n_swa=info.n_swa)
    n_outputs = n_same = 0
    differences: list[Difference] = []
    for n_decodes, (call, logits) in enumerate(play(recording, lib.llama, context, kv, vocab.n_vocab)):
        for i, ((token, checksum), (best, own, margin)) in enumerate(zip(call[2], _outputs(logits), strict=True)):
            n_outputs += 1
            n_same += checksum == own
            if token != best:
                differences.append(Difference(n_decodes, i, token, best, margin))
    lib.llama.llama_free(context)
    lib.llama.llama_model_free(model)
    return n_outputs, n_same, differences


def decode(llama: Any, context: Any, rows: list[Any]) -> None:
    """Compute rows [seq_id, pos0, n_logits, tokens] through llama_cpp's own batch: nothing of the engine is in the way."""
    batch = llama.llama_batch_init(sum(len(tokens) for *_, tokens in rows), 0, 1)
    n = 0
    for seq_id, pos0, n_logits, tokens in rows:
        for i, token in enumerate(tokens):
            batch.token[n], batch.pos[n] = token, pos0 + i
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, seq_id
            batch.logits[n] = i >= len(tokens) - n_logits
            n += 1
    batch.n_tokens = n
    code = llama.llama_decode(context, batch)
    llama.llama_batch_free(batch)
    if code != 0:
        raise RuntimeError(f"llama_decode answered {code} to a batch that the recorded build computed")


def main(arguments: list[str] | None = None) -> int:
    """Replay a file and print the result as JSON; exit code 1 when a best token differs."""
    parser = argparse.ArgumentParser(prog="llamamg.replay", description="repeat recorded batches with another build")
    parser.add_argument("file", type=Path, help="a recording")
    parser.add_argument("--build", type=Path, help="folder of the native build to use (default: the patched one)")
    options = parser.parse_args(arguments)
    n_outputs, n_same, differences = replay(Recording.read(options.file), options.build)
    result = {
        "patched": native.load(options.build).patched,
        "outputs": n_outputs,
        "same_bits": n_same,
        "differences": [dataclasses.asdict(difference) for difference in differences],
    }
    print(json.dumps(result))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
