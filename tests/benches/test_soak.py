"""Arrivals and cancels against a server, and what counts as a changed answer."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llamamg_benches import soak, soak_memory
from llamamg_benches.program import run_module
from llamamg_benches.soak_client import Counts, Kept
from llamamg_benches.soak_equal import again
from llamamg_benches.soak_judge import failures, table
from llamamg_benches.soak_memory import checkpoints_most, look

from llamamg.guard import TIE_MARGIN


class Alone:
    """A server that answers alone: `tokens`, and at each place other candidates so far behind."""

    def __init__(self, tokens: list[int], behind: dict[int, float], otherwise: float | None = None) -> None:
        self.tokens, self.behind, self.otherwise = tokens, behind, otherwise
        self.asked: list[dict[str, Any]] = []

    def post(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        behind = dict(self.behind)
        if len(self.asked) > 1 and self.otherwise is not None:
            behind = dict.fromkeys(behind, self.otherwise)
        top = [{"id": 7, "logprob": -1.0}, *({"id": i, "logprob": -1.0 - by} for i, by in behind.items())]
        return {"tokens": self.tokens, "completion_probabilities": [{"top_logprobs": top}] * len(self.tokens)}


@pytest.mark.parametrize(
    ("given", "behind", "otherwise", "verdict"),
    [
        ([7, 7, 7], {}, None, "n_equal"),
        ([7, 8, 7], {8: TIE_MARGIN / 2}, None, "n_ties"),
        ([7, 8, 7], {8: TIE_MARGIN * 2}, None, "changed"),
        ([7, 8, 7], {8: TIE_MARGIN * 2}, TIE_MARGIN / 2, "n_ties"),
        ([7, 9, 7], {8: 0.0}, None, "changed"),
        ([7, 7], {}, None, "changed"),
    ],
    ids=["equal", "tie", "far", "tie in other batches", "not a candidate", "too short"],
)
def test_what_counts_as_changed(given: list[int], behind: dict[int, float], otherwise: float, verdict: str) -> None:
    server: Any = Alone([7, 7, 7], behind, otherwise)
    found = again(server, [Kept([1, 2, 3], 3, given)], "x")
    counts = {"n_equal": found["n_equal"], "n_ties": found["n_ties"], "changed": len(found["changed"])}
    assert counts == {"n_equal": 0, "n_ties": 0, "changed": 0, verdict: 1}
    assert server.asked[0]["cache_prompt"] is False


def fine() -> dict[str, Any]:
    return {
        "burst": Counts().json(), "soak": Counts().json(), "equal": {}, "n_busy_slots": 0, "alive": True,
        "bad_words_in_log": [], "memory_mib": [{"host": 1000.0, "devices": [5000.0]}] * 2, "checkpoints_most": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"soak": Counts(errors=["boom"]).json()}, "boom"),
        ({"equal": {"burst": {"n": 9, "changed": [{"at": 3, "behind_nats": 0.9}]}}}, "differ"),
        ({"n_busy_slots": 1}, "busy"),
        ({"alive": False}, "ended"),
        ({"bad_words_in_log": ["quarantine"]}, "quarantine"),
        ({"memory_mib": [{"host": 1000.0, "devices": []}, {"host": 1200.0, "devices": []}]}, "main memory"),
        (
            {
                "memory_mib": [
                    {"host": 1000.0, "checkpoints": 0.0, "devices": []},
                    {"host": 1300.0, "checkpoints": 100.0, "devices": []},
                ]
            },
            "main memory",
        ),
        ({"memory_mib": [{"host": None, "devices": [5000.0]}, {"host": None, "devices": [5400.0]}]}, "GPU 0"),
    ],
)
def test_every_failure_is_said(change: dict[str, Any], word: str) -> None:
    assert failures(fine()) == []
    (sentence,) = failures({**fine(), **change})
    assert word in sentence


def seen(host: float, n: int, each: float = 100.0, **more: Any) -> dict[str, Any]:
    """A look at a server with `n` checkpoints of so many MiB each."""
    return {
        "host": host, "n_checkpoints": n, "checkpoints": n * each, "checkpoint_largest": each, "devices": [], "unread": [],
    } | more  # fmt: skip


def judged(*looks: dict[str, Any], n_most: int | None = 10) -> list[str]:
    return failures({**fine(), "memory_mib": list(looks), "checkpoints_most": n_most})


def test_what_slots_keep_is_no_leak() -> None:
    assert judged(seen(1000.0, 1), seen(1900.0, 10)) == []


def test_more_checkpoints_than_the_flags_allow_are_a_leak() -> None:
    """The host's growth is all theirs, and would be forgiven."""
    for looks in ([seen(1000.0, 1), seen(2000.0, 11)], [seen(1000.0, 1), seen(2000.0, 11), seen(1000.0, 1)]):
        assert judged(*looks) == [
            "checkpoints grew to 11 of 1100 MiB: slots x --ctx-checkpoints are 10, at most 1000 MiB"
        ]


def test_more_bytes_than_the_flags_allow_are_a_leak() -> None:
    grown = seen(2000.0, 10, checkpoints=2000.0)  # ten, but of twice what one of them takes
    assert "at most 1000 MiB" in judged(seen(1000.0, 10), grown)[0]
    assert judged(seen(1000.0, 10), grown, n_most=None) == [], "a server that runs already has its own flags"


def test_a_leak_beside_checkpoints_is_one() -> None:
    assert judged(seen(1000.0, 1), seen(2200.0, 10)) == ["main memory grew from 1000 to 1300 MiB"]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_look_that_failed_makes_memory_impossible_to_judge(at: int) -> None:
    looks = [seen(1000.0, 0), seen(1000.0, 0), seen(1000.0, 0)]
    looks[at]["unread"] = ["/metrics does not tell"]
    looks[at]["checkpoints"] = None
    (sentence,) = judged(*looks)
    assert sentence == f"memory cannot be judged: look {at + 1} of 3: /metrics does not tell"


@pytest.mark.parametrize(
    ("flags", "env", "n"),
    [
        (["-np", "3"], {}, 96),
        (["--ctx-checkpoints", "8"], {}, 24),
        (["--ctx-checkpoints", "8", "-ctxcp", "2"], {}, 6),
        (["--swa-checkpoints=4"], {"LLAMA_ARG_CTX_CHECKPOINTS": "5"}, 12),
        ([], {"LLAMA_ARG_CTX_CHECKPOINTS": "5"}, 15),
        (["-ctxcp", "0"], {}, 0),
    ],
)
def test_how_many_the_flags_allow(flags: list[str], env: dict[str, str], n: int) -> None:
    assert checkpoints_most(flags, env, 3) == n


class Gpus:
    """Devices that tell so much; None: nothing."""

    def __init__(self, *mib: float | None) -> None:
        self.mib = mib

    def __len__(self) -> int:
        return len(self.mib)

    def sample(self, i: int, pids: set[int]) -> dict[str, float]:
        mib = self.mib[i]
        return {} if mib is None else {"memory_mib": mib}


@pytest.fixture
def metrics() -> Iterator[Any]:
    """A server whose /metrics says `text`, or answers 503 where that is None."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = server.text
            self.send_response(503 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "busy").encode())

        def log_message(self, *_: object) -> None:
            pass

    server: Any = HTTPServer(("127.0.0.1", 0), Answer)
    server.text = None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


TOLD = "llamamg:checkpoints 2\nllamamg:checkpoint_bytes 3145728\nllamamg:checkpoint_largest_bytes 2097152\n"


@pytest.mark.parametrize(
    ("text", "gpus", "unread"),
    [
        (TOLD, (7.0,), ""),
        (None, (), "503"),
        ("llamamg:checkpoints 2\n", (), "there is no llamamg:checkpoint_bytes"),
        (TOLD.replace("3145728", "many"), (), "could not convert"),
        (TOLD, (7.0, None), "GPU 1 does not tell"),
        ("llamacpp:n_decode_total 1\n", (), ""),
    ],
    ids=["told", "an error", "missing", "no number", "a silent GPU", "another server"],
)
def test_what_a_look_could_not_read_is_said(metrics: Any, text: str | None, gpus: Any, unread: str) -> None:
    metrics.text = text
    server: Any = SimpleNamespace(url=f"http://127.0.0.1:{metrics.server_port}", process=None)
    found = look(server, Gpus(*gpus))  # type: ignore[arg-type]
    assert bool(found["unread"]) is bool(unread)
    assert unread in " ".join(found["unread"])
    if not unread and gpus:
        assert (found["n_checkpoints"], found["checkpoints"], found["checkpoint_largest"]) == (2.0, 3.0, 2.0)
    elif "GPU" not in unread:
        assert found["checkpoints"] is None, "nothing is not zero"
    assert bool(judged(found, found)) is bool(unread)
    table({**fine(), "soak_s": 1.0, "memory_mib": [found], "failures": []})


def test_processes_that_cannot_be_looked_at_are_said(metrics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.text = TOLD
    monkeypatch.setattr(soak_memory, "rss_mib", lambda pids: None)
    server: Any = SimpleNamespace(url=f"http://127.0.0.1:{metrics.server_port}", process=SimpleNamespace(pid=1))
    assert "/proc" in look(server, Gpus())["unread"][0]  # type: ignore[arg-type]


def test_a_control_says_how_many_change_by_themselves() -> None:
    one = {"at": 1, "behind_nats": 0.9}
    found = {**fine(), "equal": {"burst": {"n": 10, "changed": [one] * 3}, "control": {"n": 10, "changed": [one] * 2}}}
    assert failures(found) == []
    found["equal"]["control"] = {"n": 10, "changed": [one]}
    assert "differ" in failures(found)[0]


def test_a_control_does_not_excuse_a_token_from_far_behind() -> None:
    far = {"at": 1, "behind_nats": None}
    found = {**fine(), "equal": {"burst": {"n": 10, "changed": [far]}, "control": {"n": 10, "changed": [far] * 5}}}
    assert "not among the 20 best" in failures(found)[0]


def test_a_soak_of_a_real_server(micro_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--seconds", "4", "--sessions", "2", "--prompt", "64", "--n-predict", "8", "--sample", "3", "--seed", "3"]
    words += ["--bursts", "2", "--control", "plain:--enable none"]
    status = run_module(
        soak, [*words, "--results", str(tmp_path), "-m", str(micro_model), "-t", "1", "--enable", "none"], "soak"
    )
    assert status == 0, capfd.readouterr()
    (folder,) = tmp_path.glob("*/*-soak")
    result = json.loads((folder / "soak.json").read_text())
    assert result["burst"]["n_finished"] == result["equal"]["control"]["n"] == 4
    assert result["soak"]["n_finished"] > 3
    assert result["soak"]["n_cancelled"] > 0
    assert result["equal"]["soak"]["n"] == 3
    assert result["failures"] == []
    assert result["memory_mib"][-1]["checkpoints"] > 0, "a hybrid keeps states, and says what they take"
    assert result["checkpoints_most"] == 2 * 32
    assert 0 < max(one["n_checkpoints"] for one in result["memory_mib"]) <= 2 * 32
    assert "asked again alone" in (folder / "table.txt").read_text()


def test_side_and_control_at_the_same_time(
    micro_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--seconds",
        "0",
        "--sessions",
        "2",
        "--prompt",
        "64",
        "--n-predict",
        "8",
        "--control",
        "plain:--enable none",
    ]
    words += ["--together", "--results", str(tmp_path), "-m", str(micro_model), "-t", "1", "--enable", "none"]
    status = run_module(soak, words, "soak")
    assert status == 0, capfd.readouterr()
    (file,) = tmp_path.glob("*/*-soak/soak.json")
    equal = json.loads(file.read_text())["equal"]
    assert equal["burst"]["n"] == equal["control"]["n"] == 2
    words[1] = "4"
    assert run_module(soak, words, "soak") == 1
    assert "--together is for --seconds 0" in capfd.readouterr().err


def test_options_have_bounds() -> None:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    args = parser.parse_args(["--sessions", "0"])
    args.flags = []
    with pytest.raises(RuntimeError, match="--sessions"):
        soak.run(args)
