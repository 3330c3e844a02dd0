"""Random trainings, each carried out by the library and by a plain loop, which have to agree in every bit and call.

`case.py` draws a training from a seed and a number. `task.py` makes the user's code of it, which both sides run:
`plain.py` by a loop that is written by hand, `library.py` by a `Trainer`. `comparison.py` compares their results.

The same on several ranks, compared with `sp`: `rank_cases.py` draws, `rank_run.py` runs one rank, `rank_comparison.py`
compares.
"""
