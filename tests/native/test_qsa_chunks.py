"""A prompt in pieces of any size against one token at a time, with the same choice of blocks and experts and with its own.

One token at a time the recurrent layers compute in another order, so their results differ by rounding. That may turn a
choice between two that are nearly equal; where it does not, or is not let to, only rounding is left.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from qsa_context import Context, Logits, Model, difference, qsa, tokens
from qsa_ops import scores
from qsa_watch import BLOCKS, EXPERTS, PROBS, QUERY, Watch

from llamamg.library import Library

N_TOP, N_HEAD = 16, 4
N_PROMPT = 2062
CHUNKS = (7, 256, 512, 2048)


@pytest.fixture(scope="module")
def model(library: Library, micro: Model) -> Model:
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    return micro


def run(model: Model, chunk: int, watch: Watch) -> tuple[Logits, dict[int, NDArray[np.float32]]]:
    """Logits of the last token of the prompt, and all pooled keys."""
    with qsa(model.library, 1), Context(model, n_ctx=2304, n_ubatch=2048, watch=watch) as context:
        logits = context.feed(tokens(N_PROMPT, seed=11), chunk=chunk)
        return logits, {layer: keys.copy() for layer, keys in watch.keys.items()}


@pytest.fixture(scope="module")
def singly(library: Library, model: Model) -> tuple[Logits, Watch]:
    watch = Watch(library, N_TOP)
    return run(model, 1, watch)[0], watch


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_equal_decode_when_the_choice_is_the_same(
    library: Library, model: Model, singly: tuple[Logits, Watch], chunk: int
) -> None:
    wanted, decode = singly
    watch = Watch(library, N_TOP, forced=decode.chosen)
    logits, _ = run(model, chunk, watch)
    assert watch.n_before + watch.n_now == N_PROMPT
    assert (watch.chosen[BLOCKS, 3] == decode.chosen[BLOCKS, 3]).all()
    print(f"chunks of {chunk}: {difference(logits, wanted):.1e} of the largest logit")
    assert difference(logits, wanted) < 2e-5


@pytest.mark.parametrize("chunk", CHUNKS)
def test_only_near_ties_turn_when_each_chooses_itself(
    library: Library, model: Model, singly: tuple[Logits, Watch], chunk: int
) -> None:
    watch = Watch(library, N_TOP)
    _, keys = run(model, chunk, watch)
    theirs, ours = singly[1].chosen, watch.chosen
    margins: dict[str, list[float]] = {BLOCKS: [], EXPERTS: []}
    for name, layer in ours:
        if name not in margins:
            continue
        mine, other = ours[name, layer], theirs[name, layer][-len(ours[name, layer]) :]
        if len(mine) < N_PROMPT:
            continue  # the last layer's experts see the last token of each chunk only
        for t in np.flatnonzero((np.sort(mine) != np.sort(other)).any(axis=1)):
            if name == BLOCKS:
                values = scores(ours[QUERY, layer][t].reshape(N_HEAD, -1), keys[layer][: (t + 1) // 4])
                edge = values[mine[t]].min()
            else:
                values = ours[PROBS, layer][t].astype(np.float64)
                edge = values[mine[t]].min()
            margins[name] += [abs(values[i] - edge) / edge for i in np.setxor1d(mine[t], other[t])]
    for name, found in margins.items():
        print(f"chunks of {chunk}, {name}: {len(found) // 2} turned, largest margin {max(found, default=0):.1e}")
        assert max(found, default=0) < 1e-3
    assert sum(map(len, margins.values())) < 0.01 * N_PROMPT * N_TOP


def test_the_watch_sees_a_wrong_choice(library: Library, model: Model, singly: tuple[Logits, Watch]) -> None:
    """One block too few in the last token's list shows in its logits: forcing really forces."""
    wanted, decode = singly
    forced = decode.chosen
    forced[BLOCKS, 3] = forced[BLOCKS, 3].copy()
    assert forced[BLOCKS, 3][-1][0] >= 0
    unlisted = next(b for b in range(500) if b not in forced[BLOCKS, 3][-1])
    forced[BLOCKS, 3][-1] = np.sort(np.append(forced[BLOCKS, 3][-1][1:], unlisted))
    logits, _ = run(model, 512, Watch(library, N_TOP, forced=forced))
    assert difference(logits, wanted) > 2e-4
