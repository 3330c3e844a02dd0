"""Every public name has a docstring, and names that the documentation lacks are reported."""

from __future__ import annotations

import zlib
from pathlib import Path

import trainstack
from tools import public_names


def test_every_public_class_and_function_has_a_docstring() -> None:
    assert public_names.undocumented() == []


def test_every_public_function_describes_its_parameters() -> None:
    assert public_names.without_args() == []


def named_in_the_summary(first: int, *others: int) -> None:
    """Add `first` and `*others`."""


def named_elsewhere(first: int) -> None:
    """Add a number; arguments are numbers.

    It is `first`.
    """


def as_another(first: int) -> None:
    """Add a number; arguments as in `named_elsewhere`."""


def with_args(first: int) -> None:
    """Add a number.

    Args:
        first: the number.
    """


def test_a_docstring_describes_parameters_by_args_by_its_summary_or_by_reference() -> None:
    functions = (named_in_the_summary, named_elsewhere, as_another, with_args)
    assert [public_names.describes_parameters(one) for one in functions] == [True, False, True, True]


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
