"""trackio without a server: metrics, media, an artifact, a resume, and an open run."""

import os
import sys
from pathlib import Path

from tools.clients.trackers.common import close, losses, run


def main(folder: Path) -> None:
    """Train, crash, resume, and train in an open run."""
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    import trackio  # reads the variable

    from trainstack import TrackioWriter

    def points(project: str, name: str) -> list[dict]:
        return trackio.SQLiteStorage.get_logs(project, name)

    trainer = run(folder / "a", TrackioWriter("lines", artifacts="last"))
    (name,) = trackio.SQLiteStorage.get_runs("lines")
    logs = points("lines", name)
    assert close([(log["step"], log["train/loss"]) for log in logs if "train/loss" in log], losses(trainer))
    kinds = {key: value["_type"] for log in logs for key, value in log.items() if key.startswith("media/")}
    assert kinds == {"media/ramp": "trackio.image", "media/note": "trackio.markdown", "media/table": "trackio.table"}
    assert trackio.SQLiteStorage.get_run_config("lines", name)["module"] == {"width": 1}

    run(folder / "b", TrackioWriter("crashed"), crash=RuntimeError("crash"))
    (alert,) = trackio.SQLiteStorage.get_alerts("crashed")
    assert (alert["title"], alert["text"]) == ("run failed", "RuntimeError: crash")
    run(folder / "b", TrackioWriter("crashed"), resume="auto")
    (name,) = trackio.SQLiteStorage.get_runs("crashed")
    assert {log["step"] for log in points("crashed", name) if "train/loss" in log} == set(range(1, 9))

    mine = trackio.init("mine", name="open", embed=False)
    run(folder / "c", "trackio")
    assert trackio.context_vars.current_run.get() is mine
    trackio.log({"after": 1.0})
    trackio.finish()
    assert trackio.SQLiteStorage.get_runs("mine") == ["open"]
    assert len([log for log in points("mine", "open") if "train/loss" in log]) == 8


if __name__ == "__main__":
    main(Path(sys.argv[1]))
