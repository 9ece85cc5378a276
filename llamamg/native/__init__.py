"""The native layer: pinned sdist, patch queue, build."""
