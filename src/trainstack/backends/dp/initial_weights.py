"""What a private run states of the weights that it begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainstack.errors import PrivacyError

if TYPE_CHECKING:  # most runs are not private
    from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
    from trainstack.backends.dp.epsilon import Entry
    from trainstack.backends.privacy_statement import WeightsOrigin


def check_origin(
    origin: WeightsOrigin, args: DifferentialPrivacyArguments
) -> tuple[str, tuple[Entry, ...], tuple[str, ...]]:
    """The line of the statement, the steps that count, and why nothing is guaranteed.

    Raises:
        PrivacyError: the source was trained without privacy, and its data was not declared public.
    """
    name = f"{origin.path} (manifest {origin.digest[:16]}, backend {origin.backend})" if origin.digest else origin.path
    if args.init_weights_are_public:
        return f"{name}; declared public by init_weights_are_public", (), ()
    if origin.digest is None:
        return f"{name}, a file that does not say what it was trained on; that is not counted", (), ()
    source = origin.statement
    if source is not None and source.epsilon is not None:
        return f"{name}, whose {source.steps} private steps are among those of this statement", source.history, ()
    if args.on_unsafe == "report":
        return name, (), (f"the initial weights {name} were trained without privacy",)
    raise PrivacyError(
        f"init_weights_from={origin.path!r} was trained without a guarantee (backend {origin.backend!r}): if its data "
        "has records of this run, its weights show them without clipping and noise. If it was trained on public data, "
        "write init_weights_are_public=True in DifferentialPrivacyArguments, which the statement then says; otherwise "
        "begin with weights that have not seen private data."
    )
