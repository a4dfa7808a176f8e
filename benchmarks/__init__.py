"""Measurements beside those of `python -m smg bench`.

python -m benchmarks.compare_http           # the HTTP front beside the Rust gateway, which it installs
python -m benchmarks.admission              # tokenizing on the event loop or beside it
python -m benchmarks.drills                 # faults: how long until each is over
python -m pytest benchmarks/bench_text.py   # detokenising and stop strings, under pytest-benchmark; bench_core.py too
"""
