"""DVCLive's folder has metrics, images, parameters and the summary; a resume continues it."""

import json
import sys
from pathlib import Path

from dvclive import Live

from tools.clients.trackers.common import close, losses, run
from trainstack import DvcliveWriter


def values(folder: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of each point of a metric."""
    _, *rows = (folder / "plots" / "metrics" / f"{name}.tsv").read_text().splitlines()
    return [(int(row.split("\t")[0]), float(row.split("\t")[1])) for row in rows]


def main(folder: Path) -> None:
    """Train, crash, resume, and train with a given `Live`."""
    trainer = run(folder / "a", DvcliveWriter(save_dvc_exp=False, dvcyaml=None, artifacts="last"))
    live = folder / "a" / "dvclive"
    assert close(values(live, "train/loss"), losses(trainer))
    assert json.loads((live / "metrics.json").read_text())["step"] == 8
    assert "arguments.train_batch_size: 8" in (live / "params.yaml").read_text()
    assert (live / "plots" / "images" / "media" / "ramp.png").is_file()

    run(folder / "b", DvcliveWriter(save_dvc_exp=False, dvcyaml=None), crash=RuntimeError("crash"))
    run(folder / "b", DvcliveWriter(save_dvc_exp=False, dvcyaml=None), resume="auto")
    assert {step for step, _ in values(folder / "b" / "dvclive", "train/loss")} == set(range(1, 9))

    with Live(str(folder / "mine"), save_dvc_exp=False, dvcyaml=None) as mine:
        run(folder / "c", DvcliveWriter(mine))
        mine.log_metric("after", 1.0)
    assert len(values(folder / "mine", "train/loss")) == 8


if __name__ == "__main__":
    main(Path(sys.argv[1]))
