"""Measurements of smg, each beside its rival in the same run.

python -m benchmarks.embedded        # the library: decoding, outlets, latencies, submitting
python -m benchmarks.compare_http    # the HTTP front against the Rust gateway
python -m pytest benchmarks          # the parts that need no socket, under pytest-benchmark
"""
