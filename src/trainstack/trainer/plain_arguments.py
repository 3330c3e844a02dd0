"""Arguments from plain values: those of a file, of environment variables and of words on the command line.

Only kinds of values decide, and the names that are registered; nothing that was written is imported, called or
evaluated. Fields that can run code are set in code alone: `CODE_ONLY` lists them.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from os import PathLike
from typing import Any, get_type_hints

from trainstack._files import is_address, remote_address
from trainstack._keywords import check_known_fields
from trainstack._kinds import Kind, Place, shorten
from trainstack._yaml import Plain, read_yaml
from trainstack.backends.spec import known_layers
from trainstack.checkpointing.remote.store import ObjectStore, require_store
from trainstack.errors import ConfigurationError

Path = tuple[str, ...]
"""The names that lead to a value: `("checkpointer_args", "keep_last")`."""

CODE_ONLY = {
    "allow_pickle": "who reaches the ports of the run could then run code in it, so only code sets it",
    "environ": "it takes an object, which only code makes",
    "comm_hook": "it takes a function, which only code names",
    "class_path": "nothing that an input names is imported or made. Write the plain value, and make objects in code",
}
"""Keys that no file, variable or word may set, and why. False and null are let through."""

_COMPILE = Kind(types=frozenset([bool, str]), values=Kind(types=frozenset([bool, str, None])))
_COMPILE_OPTIONS = ("units", "fullgraph", "dynamic", "backend", "mode")  # `options` may name a compiler to execute
_KINDS = {
    "compile": _COMPILE,
    "writers": Kind(items=(Kind(types=frozenset([str])), list)),
    "backend_options": Kind(values=Kind(values=Kind(anything=True))),
}
"""Of fields whose annotation says less than what a plain value may be."""


@lru_cache(maxsize=32)
def kinds_of(cls: type) -> dict[str, Kind]:
    """The kind of each field of the dataclass `cls`."""
    hints = get_type_hints(cls)
    return {field.name: _KINDS.get(field.name) or Kind.of(hints[field.name]) for field in dataclasses.fields(cls)}


def read_config(path: str | PathLike[str]) -> dict[str, Plain]:
    """The mapping in a YAML file of arguments, at a local path or at an address such as `s3://bucket/run/config.yaml`.

    Raises:
        ConfigurationError: the file does not exist, or has no mapping that `parse_yaml` reads.
    """
    if not is_address(path):
        return read_yaml(path)
    address = remote_address("config", path)
    require_store(address)
    return read_yaml(address, _read_object)


def _read_object(address: str, limit: int) -> bytes:
    content = ObjectStore(address).read("")
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", address)
    return content


class PlainInputs:
    """Collects values from places, the later ones before the earlier, and makes arguments of them.

    Args:
        cls: `TrainerArguments`.
        other: further names, such as `"module"`, each with the kinds of what it holds.
    """

    def __init__(self, cls: Any, other: Mapping[str, Mapping[str, Kind]] | None = None) -> None:
        self._cls, self._other = cls, other or {}
        self._found: dict[Path, tuple[Any, Place]] = {}

    def add_mapping(self, values: Mapping[str, Plain], source: str) -> None:
        """Take the values of the file `source`.

        Raises:
            ConfigurationError: a key is unknown, or a value is of another kind than its field.
        """
        names = [name for name in values if name not in self._other]
        for name in names:
            _refuse_section(self._cls, name, values[name], source)
        _known(self._cls, names, source)
        for name, value in values.items():
            self._add((name,), value, Place(f"{source}: {name}"))

    def _add(self, path: Path, value: Plain, place: Place) -> None:
        nested = self._nested(path)
        if nested is None or not isinstance(value, dict):
            with self._advice(path, value, place):
                made = self.kind_of(path).value(value, place)
            self._keep(path, made, place)
            return
        _refuse_code_only(value, place)
        self._check_names(path, value, place)
        for name, item in value.items():
            self._add((*path, name), item, place.inner(name))

    def add_text(self, path: Path, text: str, place: Place) -> None:
        """Take what a word or a variable says about the value at `path`, which `paths` lists."""
        with self._advice(path, text, place):
            value = self.kind_of(path).text(text, place)
        if self._nested(path) is not None and isinstance(value, dict):
            self._add(path, value, place)
        else:
            self._keep(path, value, place)

    @contextmanager
    def _advice(self, path: Path, value: Plain, place: Place) -> Iterator[None]:
        """Let the check of a field of numbers say what to write for a value of another kind: it knows the range."""
        try:
            yield
        except ConfigurationError:
            kind = self.kind_of(path)
            if len(path) == 1 and {int, float} & kind.types and not kind.choices and bool not in kind.types:
                try:
                    self._cls(**{path[0]: value})
                except ConfigurationError as error:
                    begin, text = f"{path[0]}={value!r}: ", str(error)
                    if text.startswith(begin):
                        raise ConfigurationError(
                            f"{place.name}{place.mark}{shorten(value)}: {text.removeprefix(begin)}"
                        ) from error
            raise

    def _keep(self, path: Path, value: Any, place: Place) -> None:
        _refuse_code_only({path[-1]: value}, Place(place.name.rpartition(".")[0] or place.name, place.mark))
        _refuse_nested(value, place)
        if path[0] not in self._other:
            _check_value(path, value, place)
        drop = [old for old in self._found if old[: len(path)] == path or path[: len(old)] == old]
        for old in drop:
            del self._found[old]
        self._found[path] = (value, place)

    def paths(self) -> dict[Path, Kind]:
        """Every value that can be set, with its kind."""
        found: dict[Path, Kind] = {}
        for name, kind in kinds_of(self._cls).items():
            found[(name,)] = kind
            if kind.fields is not None:
                found |= {(name, inner): of for inner, of in kinds_of(kind.fields).items()}
        return found | {(name, inner): kind for name, kinds in self._other.items() for inner, kind in kinds.items()}

    def kind_of(self, path: Path) -> Kind:
        """The kind of the value at `path`."""
        if path[0] in self._other:
            return self._other[path[0]][path[1]] if len(path) > 1 else Kind(values=Kind(anything=True))
        kind = kinds_of(self._cls)[path[0]]
        return kind if len(path) == 1 or kind.fields is None else kinds_of(kind.fields)[path[1]]

    def _nested(self, path: Path) -> type | str | None:
        """The owner of the names below `path`; None if the value itself is plain."""
        if len(path) > 1:
            return None
        return path[0] if path[0] in self._other else kinds_of(self._cls)[path[0]].fields

    def _check_names(self, path: Path, value: Mapping[str, Any], place: Place) -> None:
        nested = self._nested(path)
        if isinstance(nested, type):
            _known(nested, value, place.name)
        else:
            for name in value:
                if name not in self._other[path[0]]:
                    raise ConfigurationError(unknown(place.name, name, self._other[path[0]], f"{path[0]} parameter"))

    def others(self, name: str) -> dict[str, Any]:
        """The values below the further name `name`."""
        return {path[1]: value for path, (value, _) in self._found.items() if path[0] == name and len(path) > 1}

    def arguments(self) -> Any:
        """The arguments of all values.

        Raises:
            ConfigurationError: a value is out of range, or two contradict each other.
        """
        tree: dict[str, Any] = {}
        for path, (value, _) in self._found.items():
            if path[0] in self._other:
                continue
            if len(path) == 1:
                tree[path[0]] = value
            else:
                tree.setdefault(path[0], {})[path[1]] = value
        self._check_required(tree)
        try:
            return self._cls.from_dict(tree)
        except ConfigurationError as error:
            raise self._placed(error) from error

    def _check_required(self, tree: Mapping[str, Any]) -> None:
        for name, value in tree.items():
            cls = kinds_of(self._cls)[name].fields
            if cls is None or not isinstance(value, dict):
                continue
            must = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
            absent = [inner for inner in must if inner not in value]
            if absent:
                raise ConfigurationError(f"{name} lacks {', '.join(absent)}. Write them as well, or leave {name} out.")

    def _placed(self, error: ConfigurationError) -> ConfigurationError:
        """`error`, which begins with the name and value of an argument, with the place where that was written."""
        text = str(error)
        for path, (value, place) in self._found.items():
            given = f"{path[-1]}={value!r}"
            for begin in (f"{given}: ", f"{path[0]}.{given}: "):
                if text.startswith(begin):
                    return type(error)(f"{place.name}{place.mark}{shorten(value)}: {text.removeprefix(begin)}")
        places = [place.name for path, (_, place) in self._found.items() if text.startswith((path[0], path[-1]))]
        if not places:
            return error
        named = f"{places[0].rpartition(': ')[2]}: "
        return type(error)(f"{places[0]}: {text.removeprefix(named)}")


def _known(cls: Any, names: Iterable[str], where: str) -> None:
    try:
        check_known_fields(cls, names, where)
    except ConfigurationError as error:
        raise ConfigurationError(shorten(str(error), 2000)) from error


def _refuse_section(cls: Any, name: str, value: Plain, source: str) -> None:
    """Refuse arguments that are under a heading, as in PyMarlin's files."""
    fields = {field.name for field in dataclasses.fields(cls)}
    if name not in fields and isinstance(value, dict):
        held = next((key for key in value if key in fields), None)
        if held is not None:
            raise ConfigurationError(
                f"{source}: {shorten(name)} is not an argument, and has the argument {held} under it. Arguments are at "
                f"the top of the file: write {held}: {shorten(str(value[held]))} without {shorten(name)}."
            )


def unknown(where: str, name: str, known: Iterable[str], what: str = "option") -> str:
    """The sentence about a name that there is not, with the one that was perhaps meant."""
    close = difflib.get_close_matches(shorten(name), list(known), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{where}: there is no {what} {shorten(name)}.{hint}"


def _refuse_code_only(value: Mapping[str, Any], place: Place) -> None:
    for key, item in value.items():
        if key in CODE_ONLY and item not in (False, None):
            raise place.inner(key).wrong(item, CODE_ONLY[key])


def _check_value(path: Path, value: Any, place: Place) -> None:
    """Refuse what the kind of a field lets through and a plain value may not be."""
    if path == ("compile",) and isinstance(value, dict):
        for key, item in value.items():
            if key not in _COMPILE_OPTIONS:
                instead = f"write {', '.join(_COMPILE_OPTIONS)}; other options of torch.compile are set in code"
                raise place.inner(key).wrong(item, instead)
    if path == ("backend_options",) and isinstance(value, dict):
        for token, options in value.items():
            _check_layer_options(token, options, place.inner(token))


def _refuse_nested(value: Any, place: Place) -> None:
    if isinstance(value, dict):
        _refuse_code_only(value, place)
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _refuse_nested(item, place.inner(key))


def _check_layer_options(token: str, options: Mapping[str, Plain], place: Place) -> None:
    """Refuse options that the layer's constructor does not take as plain values; an unknown layer is found later."""
    record = known_layers().get(token) or known_layers().get(token.replace("_", "-"))
    if record is None:
        return
    parameters = parameters_of(record.layer)
    for name, value in options.items():
        if name in ("self", "inner"):
            raise place.inner(name).wrong(value, "the layer inside is given by the backend string")
        kind = parameters.get(name) or _SCALARS
        kind.value(value, place.inner(name))


_SCALARS = Kind(types=frozenset([bool, int, float, str, None]))


def parameters_of(function: Callable[..., Any]) -> dict[str, Kind]:
    """The kind of each parameter that can be given by its name; without an annotation it takes each plain value."""
    made_by: Any = function
    if isinstance(function, type):
        made_by = next(vars(base)["__init__"] for base in function.__mro__ if "__init__" in vars(base))
    try:
        hints = get_type_hints(made_by)
    except Exception:  # a name in an annotation that is there for type checkers alone
        hints = {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: Kind.of(hints.get(name, Any))
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in named
    }


def is_plain(value: Any) -> bool:
    """Whether a file can hold `value`. An enum or a number of numpy is left out: the file would change its class."""
    if type(value) is list:
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    return value is None or type(value) in (str, bool, int, float)
