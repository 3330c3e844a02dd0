"""Random trainings with the library and with a plain loop, which have to agree in every bit and call.

`case.py` draws a training from a seed and a number. `task.py` has the user code, which both sides run: `plain.py` with
a hand-written loop, `library.py` with a `Trainer`. `comparison.py` compares the results.

For several ranks, `rank_cases.py` draws, `rank_run.py` runs one rank, and `rank_comparison.py` compares with `sp`.
"""
