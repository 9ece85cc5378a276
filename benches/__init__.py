"""Benchmarks: `python -m benches.NAME`. Results go to benches/results/<machine>/<date>-<what>/, JSON first."""
