"""A real kernel of Jupyter: the bar and the table of epochs are one output that is updated; reprs, frame and plot."""

import sys
from pathlib import Path

import nbclient
import nbformat

TRAIN = """
from pathlib import Path
from tools.clients.trackers.common import Line
import trainstack as ts
trainer = ts.Trainer(Line(), ts.TrainerArguments(epochs=2, train_batch_size=8, log_every=1, writers=[],
                                                 output_dir=Path({folder!r}), log_level="ERROR"))
trainer.train()
"""
SHOW = ["trainer", "trainer.history", "trainer.history.to_frame()", "%matplotlib inline\ntrainer.history.plot();"]


def main(folder: Path) -> None:
    """Run a notebook and check its outputs."""
    cells = [TRAIN.format(folder=str(folder / "run")), *SHOW]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    training, shown, history, frame, plot = (cell.outputs for cell in notebook.cells)

    (display,) = [output for output in training if output.output_type == "display_data"]
    html = display.data["text/html"]  # the last update
    assert "<progress" not in html
    assert html.count("<tr>") == 3, html  # the head and two epochs
    assert "<th>train/loss</th>" in html
    assert not [output for output in training if output.output_type == "stream"], training

    assert "Trainer(Line, backend=&#x27;sp&#x27;, finished, epoch 2 of 2, step 8" in shown[0].data["text/html"]
    assert shown[0].data["text/plain"].startswith("Trainer(Line")
    assert history[0].data["text/html"].count("<tr>") == 3
    assert history[0].data["text/plain"].startswith("RunHistory(")
    assert "train/loss" in frame[0].data["text/html"]
    assert [output for output in plot if "image/png" in output.get("data", {})]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
