"""Where the buffers of small-graphs find no memory, a context goes on with one graph: so nothing counts them before loading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llamamg.library import Library

# Two sessions answer without the plugin; then it is turned on, with `room` bytes left to the process, and they answer again.
RUN = """
import json, re, resource, sys
from pathlib import Path
import numpy as np
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig, ServerConfig
from llamamg.loading import load
from llamamg.plugins import PluginSet
from llamamg.request import Failed, Finished, Request, SamplingParams

NAME = "small-graphs"
plugins = PluginsConfig(enable=(NAME,), only=True)
context = ContextConfig(
    n_ctx=131072, n_parallel=2, n_batch=512, n_ubatch=512, kv_unified=False, n_threads=1, n_threads_batch=1, warmup=False
)
config = Config(ModelConfig(Path(sys.argv[1])), context, plugins=plugins, server=ServerConfig(log_level=4))
engine = load(config, PluginSet.discover(plugins))
events = []
engine.deliver = events.extend

def ask():
    events.clear()
    for n_prompt, n_predict in ((20, 12), (300, 3)):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        prompt = np.arange(1000, 1000 + n_prompt, dtype=np.int32)
        engine.submit(Request(prompt, sampling, n_predict=n_predict, return_tokens=True, cache_prompt=False))
    ends = []
    while len(ends) < 2:
        engine.step()
        ends = [event for _, event in events if isinstance(event, (Finished, Failed))]
    return sorted(list(end.tokens) if isinstance(end, Finished) else [end.message] for end in ends)

engine.plugins.toggle(NAME, False)
answers = [ask()]
if room := int(sys.argv[2]):
    held = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + room, resource.RLIM_INFINITY))
engine.plugins.toggle(NAME, True)
answers.append(ask())
print(json.dumps(answers))
"""


@pytest.mark.parametrize("room", [0, 100 << 20], ids=["room", "no room"])
def test_without_room_there_is_one_graph(room: int, library: Library, micro_model: Path) -> None:
    """Of 100 MiB a scheduler's description of its graph takes 70; the 62 of the buffer do not fit."""
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    words = [sys.executable, "-c", RUN, str(micro_model), str(room)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    off, on = json.loads(done.stdout)
    assert on == off
    assert [len(tokens) for tokens in on] in ([3, 12], [12, 3])
    added = done.stderr.count("for 1 graph of up to 64 tokens")
    assert (added, "no room for graphs of small ubatches" in done.stderr) == ((1, True) if room else (2, False))
