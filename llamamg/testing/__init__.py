"""An engine without a model, for tests of plugins and of the engine itself: decoding and sampling are a Python function."""

from llamamg.testing.cells import UNKNOWN, FakeCells, FakeStateCopy
from llamamg.testing.engines import ask, fake_engine, model_info, run
from llamamg.testing.memory import FakeKV
from llamamg.testing.runner import FakeRunner, NextToken, count_up
from llamamg.testing.vocabulary import EOS, FakeSampler, FakeVocabulary

__all__ = [
    "EOS",
    "UNKNOWN",
    "FakeCells",
    "FakeKV",
    "FakeRunner",
    "FakeSampler",
    "FakeStateCopy",
    "FakeVocabulary",
    "NextToken",
    "ask",
    "count_up",
    "fake_engine",
    "model_info",
    "run",
]
