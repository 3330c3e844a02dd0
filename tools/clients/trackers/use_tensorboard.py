"""The readers of TensorBoard find scalars, an image, a text, a table, hyperparameters and the status."""

import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from tools.clients.trackers.common import close, losses, run

SESSION = "_hparams_/session_{}_info"


def read(folder: Path) -> EventAccumulator:
    """All events of a run."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    return events.Reload()


def hparams(events: EventAccumulator, which: str) -> plugin_data_pb2.HParamsPluginData:
    """The begin or the end of the session for the tab HPARAMS."""
    content = events.SummaryMetadata(SESSION.format(which)).plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content)


def main(folder: Path) -> None:
    """Train, crash and resume."""
    trainer = run(folder / "a", "tensorboard")
    events = read(folder / "a")
    assert close([(event.step, event.value) for event in events.Scalars("train/loss")], losses(trainer))
    assert [event.step for event in events.Images("media/ramp")] == [4, 8]
    assert events.Images("media/ramp")[0].width == 8
    assert events.Tensors("media/note")[1].tensor_proto.string_val[0] == b"after step 8"
    assert b"| step | weight |" in events.Tensors("media/table")[0].tensor_proto.string_val[0]
    start = hparams(events, "start").session_start_info
    assert start.hparams["module.width"].number_value == 1
    assert start.hparams["arguments.train_batch_size"].number_value == 8
    assert hparams(events, "end").session_end_info.status == 1  # success

    run(folder / "b", "tensorboard", crash=RuntimeError("crash"))
    assert hparams(read(folder / "b"), "end").session_end_info.status == 2  # failure
    trainer = run(folder / "b", "tensorboard", resume="auto")
    events = read(folder / "b")
    assert close([(event.step, event.value) for event in events.Scalars("train/loss")], losses(trainer))
    assert [event.step for event in events.Images("media/ramp")] == [4, 8]
    assert hparams(events, "end").session_end_info.status == 1
    assert hparams(events, "start").session_start_info.hparams["module.width"].number_value == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
