"""The cost of a training step: hand-written loops and trainstack, interleaved, in CPU time.

`python -m tools.bench` prints a table of ratios for each workload. A contender is one file in
`tools/bench/contenders`; a workload is one function in `tools/bench/workloads.py`.
"""
