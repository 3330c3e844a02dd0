"""`raw` a second time: the distance of its ratio from 1 is the accuracy of all ratios."""

from __future__ import annotations

from tools.bench.contender import Contender
from tools.bench.contenders.raw import prepare

CONTENDER = Contender(name="null", rank=1, against="raw", prepare=prepare, kinds=("train", "tuned", "evaluate"))
