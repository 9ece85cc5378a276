"""Random-weight models of the `qwen4exp` architecture, for tests and benchmarks."""

from llamamg.synth.command import add_arguments, run
from llamamg.synth.preset import PRESETS, Preset, SynthError
from llamamg.synth.writer import write_model

__all__ = ["PRESETS", "Preset", "SynthError", "add_arguments", "run", "write_model"]
