"""Measurements beside those of `python -m smg bench`.

python -m benchmarks.compare_http    # the HTTP front against the Rust gateway
python -m benchmarks.admission       # tokenizing on the event loop or beside it
python -m pytest benchmarks          # the parts that need no socket, under pytest-benchmark
"""
