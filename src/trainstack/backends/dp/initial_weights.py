"""The line of a private statement on the weights that a run begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainstack.errors import PrivacyError

if TYPE_CHECKING:  # most runs are not private
    from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
    from trainstack.backends.dp.budget import Accountant
    from trainstack.backends.dp.epsilon import Entry
    from trainstack.backends.privacy_statement import WeightsOrigin


Origin = tuple[str, "Sequence[Entry]", Sequence[str]]
"""The line of the statement, the steps that count, and why nothing is guaranteed."""


def check_origin(origin: WeightsOrigin, args: DifferentialPrivacyArguments) -> Origin:
    """The charge of weights from a file or folder.

    Raises:
        PrivacyError: the source was trained without privacy, and its data was not declared public.
    """
    name = f"{origin.path} (manifest {origin.digest[:16]}, backend {origin.backend})" if origin.digest else origin.path
    if args.init_weights_are_public:
        return f"{name}; declared public by init_weights_are_public", (), ()
    if origin.digest is None:
        return f"{name}, a file without a record of its training, which is not counted", (), ()
    source = origin.statement
    if source is not None and source.epsilon is not None:
        return f"{name}, whose {source.steps} private steps are among those of this statement", source.history, ()
    return _without_privacy(f"init_weights_from={origin.path!r}", f"of backend {origin.backend!r}", name, args)


def origin_in_process(earlier: Accountant | None, args: DifferentialPrivacyArguments) -> Origin:
    """The charge of an earlier run of this process on the same module; None for a run without privacy.

    Raises:
        PrivacyError: it was without privacy, and its data was not declared public.
    """
    history = [] if earlier is None else earlier.last_history()
    kind = "without privacy" if earlier is None else f"of {sum(steps for _, _, steps in history)} private steps"
    name = f"those of a run before in this process, {kind}"
    if args.init_weights_are_public:
        return f"{name}; declared public by init_weights_are_public", (), ()
    if earlier is None:
        return _without_privacy("the module", "by another Trainer of this process", name, args)
    return f"{name}, which are among those of this statement", history, earlier.overrides


def _without_privacy(what: str, by: str, name: str, args: DifferentialPrivacyArguments) -> Origin:
    if args.on_unsafe == "report":
        return name, (), (f"the initial weights were trained without privacy: {name}",)
    raise PrivacyError(
        f"{what} was trained without a guarantee, {by}: if its data has records of this run, the weights show them "
        "without clipping and noise. If it was trained on public data, write init_weights_are_public=True in "
        "DifferentialPrivacyArguments, which the statement then says; otherwise begin with weights that have not seen "
        "private data."
    )
