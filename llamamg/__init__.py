"""llamamg: a plugin-based runtime layer on llama.cpp's Python binding."""

__version__ = "0.1.0"
