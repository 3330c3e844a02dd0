"""Every public name has a docstring, and names that the documentation lacks are reported."""

from __future__ import annotations

import zlib
from pathlib import Path

import trainstack
from tools import public_names


def test_every_public_class_and_function_has_a_docstring() -> None:
    assert public_names.undocumented() == []


class Documented(trainstack.Callback):
    """One method is documented by its event, one by a base class, and one has no documentation."""

    __module__ = "trainstack.made_up"  # methods of other projects are not checked

    def on_train_begin(self) -> None: ...

    def get_state(self) -> None: ...

    def helps(self) -> None: ...


def test_a_method_without_a_docstring_is_reported() -> None:
    assert public_names.undocumented_methods(Documented) == ["helps"]


def test_every_name_that_trainstack_exports_is_checked() -> None:
    assert set(public_names.names_of("trainstack")) == set(trainstack.__all__) - {"__version__"}
    assert {"TOTAL_STEPS", "WORLD_SIZE"} <= set(public_names.names_of("trainstack.trainer.schedulers.placeholders")) | {
        name for name in dir(trainstack.placeholders) if name.isupper()
    }


def test_names_outside_the_inventory_of_the_site_are_reported(tmp_path: Path) -> None:
    every = {f"{package}.{name}" for package in public_names.PACKAGES for name in public_names.names_of(package)}
    written = "\n".join(f"{name} py:function 1 api/#$ -" for name in sorted(every - {"trainstack.Trainer"}))
    (tmp_path / "objects.inv").write_bytes(b"# one\n# two\n# three\n# four\n" + zlib.compress(written.encode()))
    entries = public_names.inventory(tmp_path)
    assert public_names.unlisted(entries - {"trainstack.trainer.Trainer"}) == [
        "trainstack.Trainer",
        "trainstack.trainer.Trainer",
    ]
    assert public_names.unlisted(entries | {"trainstack.Trainer"}) == []
