"""Images, texts and tables on their way to the writers: `MediaLog`, and the conversion of the user's values."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer.tracking.provenance import Provenance

Pixels = np.ndarray[Any, Any]
"""uint8 of the shape (height, width, 3), RGB."""


class MediaLog:
    """The methods that send figures, images, texts and tables to the writers of a run, on the main process.

    They need a writer that takes them, such as that of TensorBoard. In private runs they follow the rule of metrics:
    values computed from training data without noise are not written, and neither are values of unknown origin. Within
    an evaluation they are values of the evaluation. A user who gives another `provenance` is responsible for it.
    """

    def log_figure(self, name: str, figure: Any, *, provenance: Provenance | None = None) -> None:
        """Write a figure as an image at the current step. The figure is drawn at once and stays open.

        Args:
            name: of the series of images, such as "val/confusion".
            figure: of matplotlib, or its axes.
            provenance: of its values, for private runs.

        Raises:
            ConfigurationError: it is not a figure, or no training is running.
        """
        self._log_media("log_image", name, lambda: figure_pixels(figure), provenance)

    def log_image(self, name: str, image: Any, *, provenance: Provenance | None = None) -> None:
        """Write an image at the current step.

        Args:
            name: of the series of images.
            image: a tensor of the shape (channels, height, width), an array of the shape (height, width, channels),
                either without channels, or an image of PIL. 1, 3 or 4 channels; floating-point values are clipped to
                [0, 1], others are uint8.
            provenance: of its values, for private runs.

        Raises:
            ConfigurationError: it is not an image, or no training is running.
        """
        self._log_media("log_image", name, lambda: image_pixels(image), provenance)

    def log_text(self, name: str, text: str, *, provenance: Provenance | None = None) -> None:
        """Write a text at the current step.

        Args:
            name: of the series of texts.
            text: a string.
            provenance: of the text, for private runs.

        Raises:
            ConfigurationError: it is not a string, or no training is running.
        """
        self._log_media("log_text", name, lambda: _text(text), provenance)

    def log_table(
        self, name: str, table: Any, columns: Sequence[str] | None = None, *, provenance: Provenance | None = None
    ) -> None:
        """Write a table at the current step.

        Args:
            name: of the table.
            table: a dict of columns, a list of dicts, a data frame, or a list of rows.
            columns: the names of the columns of a list of rows.
            provenance: of its values, for private runs.

        Raises:
            ConfigurationError: it is not a table, or no training is running.
        """
        self._log_media("log_table", name, lambda: make_table(table, columns), provenance)

    def _log_media(self, kind: str, name: str, make: Callable[[], Any], provenance: Provenance | None) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Table:
    """Names of columns, and rows of numbers, strings, booleans and None.

    Attributes:
        columns: their names.
        rows: as long as `columns` each.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def to_dict(self) -> dict[str, list[Any]]:
        """The values of each column, by name."""
        return {name: [row[place] for row in self.rows] for place, name in enumerate(self.columns)}

    def to_markdown(self) -> str:
        """The table in Markdown."""
        return "\n".join(_markdown_lines(self))


def _markdown_lines(table: Table) -> Iterator[str]:
    for row in (table.columns, ["---"] * len(table.columns), *table.rows):
        yield f"| {' | '.join(' '.join(str(cell).replace('|', '&#124;').split()) for cell in row)} |"


def png(image: Pixels) -> bytes:
    """`image` as a PNG file.

    Raises:
        MissingExtraError: pillow is not installed.
    """
    try:
        from PIL.Image import fromarray
    except ImportError as error:
        raise MissingExtraError("an image as a file", "pillow", "plot") from error
    buffer = io.BytesIO()
    fromarray(image).save(buffer, "png")
    return buffer.getvalue()


def figure_pixels(figure: Any) -> Pixels:
    """Draw a figure of matplotlib, at its own size and resolution.

    Raises:
        ConfigurationError: it is none.
    """
    figure = getattr(figure, "figure", figure)  # axes know theirs
    if not hasattr(figure, "savefig"):
        raise ConfigurationError(
            f"log_figure was given a {type(figure).__name__}. Give a figure of matplotlib, or write log_image for an "
            "array or a tensor."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    before = figure.canvas
    try:
        canvas: Any = FigureCanvasAgg(figure)  # with any backend that shows the figure
        canvas.draw()
        return np.array(canvas.buffer_rgba())[..., :3]
    finally:
        figure.set_canvas(before)


def image_pixels(image: Any) -> Pixels:
    """The argument of `MediaLog.log_image` as RGB pixels.

    Raises:
        ConfigurationError: it is something else.
    """
    given = image
    if hasattr(image, "convert"):  # an image of PIL
        return np.array(image.convert("RGB"))
    if isinstance(image, torch.Tensor):
        image = image.detach().to("cpu", torch.float32 if image.is_floating_point() else image.dtype).numpy()
        image = np.moveaxis(image, 0, -1) if image.ndim == 3 else image
    image = np.asarray(image)
    image = image[..., None] if image.ndim == 2 else image
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or not image.size or not _is_image_type(image.dtype):
        what = f"{tuple(given.shape)} and {given.dtype}" if hasattr(given, "shape") else repr(given)[:80]
        raise ConfigurationError(
            f"log_image was given {what}. Give a tensor of the shape (channels, height, width), an array of the shape "
            "(height, width, channels), with 1, 3 or 4 channels, floating-point or uint8, or an image of PIL. "
            "torchvision.utils.make_grid makes one image of a batch."
        )
    if image.dtype == np.bool_ or image.dtype.kind == "f":
        image = (np.nan_to_num(image.astype(np.float32)).clip(0, 1) * 255).round().astype(np.uint8)
    return np.ascontiguousarray(np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image[..., :3])


def _is_image_type(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype in (np.uint8, np.bool_)


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise ConfigurationError(f"log_text was given a {type(text).__name__}. Give a string: str(value).")
    return text


def make_table(table: Any, columns: Sequence[str] | None = None) -> Table:
    """The argument of `MediaLog.log_table` as a table.

    Raises:
        ConfigurationError: it is something else.
    """
    data = table.to_dict("list") if hasattr(table, "iloc") else table  # a data frame of pandas
    data = table.to_dict(as_series=False) if hasattr(table, "get_columns") else data  # one of polars
    if isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
        keys = dict.fromkeys(name for row in data for name in row)
        data = {name: [row.get(name) for row in data] for name in keys}
    if isinstance(data, Mapping):
        values = [list(column) for column in data.values()]
        _check_table(len({len(column) for column in values}) <= 1, "columns of different lengths")
        names: tuple[Any, ...] = tuple(data)
        rows: list[tuple[Any, ...]] = list(zip(*values, strict=True))
    else:
        is_rows = isinstance(data, Sequence | np.ndarray | torch.Tensor) and not isinstance(data, str)
        _check_table(is_rows and columns is not None, f"a {type(table).__name__} without columns=")
        names, rows = tuple(columns or ()), [tuple(row) for row in data]
        _check_table(all(len(row) == len(names) for row in rows), f"rows that have not {len(names)} cells each")
    return Table(tuple(map(str, names)), tuple(tuple(map(_cell, row)) for row in rows))


def _check_table(holds: bool, what: str) -> None:
    if not holds:
        raise ConfigurationError(
            f"log_table was given {what}. Give a dict of columns, all of one length, a list of dicts, a data frame, or "
            "rows with columns=['name', ...]."
        )


def _cell(value: Any) -> Any:
    if (
        isinstance(value, torch.Tensor | np.generic | np.ndarray)
        and (value.numel() if isinstance(value, torch.Tensor) else value.size) == 1
    ):
        value = value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
