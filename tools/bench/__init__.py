"""Measure the CPU time of a training step of hand-written loops and of trainstack, interleaved.

`python -m tools.bench` prints a table of ratios for each workload. A contender is a file in `tools/bench/contenders`, a
workload a function in `tools/bench/workloads.py`.
"""
