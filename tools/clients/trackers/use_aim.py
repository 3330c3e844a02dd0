"""An Aim repository gets metrics, media, hyperparameters and the status; a resume continues its run."""

import sys
import time
from pathlib import Path

import aim
from aim.storage.context import Context

from tools.clients.trackers.common import close, losses, run
from trainstack import AimWriter

EMPTY = Context({})


def values(found: aim.Run, name: str) -> list[tuple[int, float]]:
    """Step and value of each point of a metric."""
    frame = found.get_metric(name, EMPTY).dataframe()
    return sorted(zip(frame["step"].tolist(), frame["value"].tolist(), strict=True))


def indexed(repo: str) -> aim.Repo:
    """The repository with a current index, which `aim up` maintains otherwise."""
    time.sleep(1.0)  # Aim caches its list of runs for half a second, so without the wait it lacks a new run
    found = aim.Repo(repo)
    found._recreate_index()
    return found


def main(folder: Path) -> None:
    """Train, crash, resume, and train in a given run."""
    repo = str(folder / "repo")
    aim.Repo.from_path(repo, init=True)
    trainer = run(folder / "a", AimWriter(repo=repo, experiment="lines"))
    (found,) = indexed(repo).iter_runs()
    assert close(values(found, "train/loss"), losses(trainer))
    assert found["hparams"]["arguments"]["train_batch_size"] == 8
    assert found["hparams"]["module"] == {"width": 1}
    assert found["status"] == "finished"
    assert len(found.get_image_sequence("media/ramp", EMPTY).values.sparse_list()[1]) == 2
    texts = found.get_text_sequence("media/note", EMPTY).values.sparse_list()[1]
    assert {text.data for text in texts} == {"after step 4", "after step 8"}

    run(folder / "b", AimWriter(repo=repo), crash=RuntimeError("crash"))
    (failed,) = [one for one in indexed(repo).iter_runs() if one["status"] == "failed"]
    assert failed["reason"] == "RuntimeError: crash"
    trainer = run(folder / "b", AimWriter(repo=repo), resume="auto")
    (resumed,) = [one for one in indexed(repo).iter_runs() if one.hash == failed.hash]
    assert resumed["status"] == "finished"
    assert {step for step, _ in values(resumed, "train/loss")} == set(range(1, 9))

    mine = aim.Run(repo=repo, system_tracking_interval=None, capture_terminal_logs=False)
    run(folder / "c", AimWriter(run=mine))
    mine["still"] = "open"
    assert len(values(mine, "train/loss")) == 8
    mine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
