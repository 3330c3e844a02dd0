"""`raw` a second time: how far its ratio is from one is how far any ratio can be trusted."""

from __future__ import annotations

from tools.bench.contender import Contender
from tools.bench.contenders.raw import prepare

CONTENDER = Contender(name="null", rank=1, against="raw", prepare=prepare, kinds=("train", "tuned", "evaluate"))
