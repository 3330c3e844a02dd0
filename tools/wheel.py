"""Build the wheel, install it alone with its requirements, and run README's script and the quickstart there.

`make wheel` runs this. `make release` runs `python -m tools.wheel dist`, which uses the wheel in that folder instead of
building one, and checks the source distribution. The requirements are linked from this environment, because an
installation of torch takes long: those that the wheel declares without extras, and theirs. `pip check` finds gaps.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tools.pages import ROOT, Runner, blocks_of

PAGES = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")


def main() -> None:
    """Build or find the wheel, check its files, install it, run code with it."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        wheel = find(Path(sys.argv[1])) if len(sys.argv) > 1 else build(Path(folder, "dist"))
        look_inside(wheel)
        python = install(wheel, Path(folder, "env"))
        use(python, Path(folder, "use"))
    print(f"{wheel.name}: installed without extras, and used")


def pip(*arguments: str) -> None:
    """Call pip of this environment."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def build(into: Path) -> Path:
    """The wheel of this source tree, written to `into`."""
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(into), str(ROOT))
    (wheel,) = into.glob("*.whl")
    return wheel


def find(folder: Path) -> Path:
    """The wheel in `folder`. The source distribution next to it has only files of git, and the metadata."""
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    if strange := names - {*listed, "PKG-INFO"}:
        sys.exit(f"{archive.name} has files that are not in git: {sorted(strange)}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def look_inside(wheel: Path) -> None:
    """All files of the library are in it, and nothing else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    library = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "trainstack").rglob("*.py")}
    strange = {name for name in names - library if ".dist-info/" not in name and not name.endswith("py.typed")}
    if library - names or strange:
        sys.exit(f"the wheel lacks {sorted(library - names)} and has {sorted(strange)} in addition to the library")


def install(wheel: Path, into: Path) -> Path:
    """A fresh environment with the wheel and its requirements; returns its interpreter."""
    venv.create(into, with_pip=False)
    python = into / "bin" / "python"
    pip("--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    (packages,) = into.glob("lib/python*/site-packages")
    for required in requirements(Distribution.at(next(packages.glob("trainstack-*.dist-info"))), {}).values():
        for top in {file.parts[0] for file in required.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(required.locate_file(top))))
    pip("--python", str(python), "check")
    return python


def requirements(of: Distribution, known: dict[str, Distribution]) -> dict[str, Distribution]:
    """The requirements of a package without its extras, and theirs, as installed here; by name."""
    for line in of.requires or ():
        needed = Requirement(line)
        name = re.sub(r"[-_.]+", "-", needed.name).lower()
        if name not in known and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            known[name] = distribution(needed.name)
            requirements(known[name], known)
    return known


def use(python: Path, folder: Path) -> None:
    """Run the command, the README's first block and the quickstart, far from the source tree."""
    folder.mkdir()
    command = python.parent / "trainstack"
    subprocess.run([command, "explain", "sp-amp"], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    (folder / "a.py").write_text("def a(): ...\n", encoding="utf-8")
    refused = subprocess.run([command, "train", "a.py:b"], capture_output=True, text=True, check=False, cwd=folder)
    if "no class or function is called 'b'" not in refused.stderr:
        sys.exit(f"`trainstack train` of a name that there is not said:\n{refused.stderr}")
    with Runner(str(python)) as runner:
        for page in PAGES:
            blocks = blocks_of(page)
            place = folder / page.stem
            place.mkdir()
            runner.run(blocks[:1] if page.name == "README.md" else blocks, place)


if __name__ == "__main__":
    main()
