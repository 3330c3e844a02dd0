"""Arguments from plain values: of a file, of environment variables and of words on the command line.

Only the types of values and registered names count; no input is imported, called or evaluated. Fields that can run code
can only be set in code: `CODE_ONLY` lists them.
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
from types import MethodType
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
    "allow_pickle": "anyone who can reach the ports of the run could then run code in it, so set it in code",
    "environ": "it takes an object, so set it in code",
    "comm_hook": "it takes a function, so set it in code",
    "class_path": "an input cannot name a class to import. Write the plain value, and make objects in code",
}
"""Keys that no file, variable or word may set, with the reason. False and null are allowed."""

_COMPILE = Kind(types=frozenset([bool, str]), values=Kind(types=frozenset([bool, str, None])))
_COMPILE_OPTIONS = ("units", "fullgraph", "dynamic", "backend", "mode")  # `options` may name a compiler to execute
_KINDS = {
    "compile": _COMPILE,
    "writers": Kind(items=(Kind(types=frozenset([str])), list)),
    "backend_options": Kind(values=Kind(values=Kind(anything=True))),
}
"""Kinds of fields whose annotations do not describe the plain values."""


@lru_cache(maxsize=32)  # more than there are dataclasses of arguments
def kinds_of(cls: type) -> dict[str, Kind]:
    """Return the kind of each field of the dataclass `cls`."""
    hints = get_type_hints(cls)
    return {field.name: _KINDS.get(field.name) or Kind.of(hints[field.name]) for field in dataclasses.fields(cls)}


def read_config(path: str | PathLike[str]) -> dict[str, Plain]:
    """Read the mapping in a YAML file of arguments, at a local path or at an address such as `s3://bucket/config.yaml`.

    Raises:
        ConfigurationError: the file does not exist, or has no mapping that `parse_yaml` can read.
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
    """Collects values from several sources, later ones overriding earlier ones, and makes arguments of them.

    Args:
        cls: `TrainerArguments`.
        other: further names, such as `"module"`, with the kinds of their values by name.
    """

    def __init__(self, cls: Any, other: Mapping[str, Mapping[str, Kind]] | None = None) -> None:
        self._cls, self._other = cls, other or {}
        self._found: dict[Path, tuple[Any, Place]] = {}

    def add_mapping(self, values: Mapping[str, Plain], source: str) -> None:
        """Add the values of the file `source`.

        Raises:
            ConfigurationError: a key is unknown, or a value has another type than its field.
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
        """Add the text of a word or variable as the value at `path`, one of `paths`."""
        with self._advice(path, text, place):
            value = self.kind_of(path).text(text, place)
        if self._nested(path) is not None and isinstance(value, dict):
            self._add(path, value, place)
        else:
            self._keep(path, value, place)

    @contextmanager
    def _advice(self, path: Path, value: Plain, place: Place) -> Iterator[None]:
        """Use the error of the field's own check for a number of another type, because it has the range."""
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
        """Return every value that can be set, with its kind."""
        found: dict[Path, Kind] = {}
        for name, kind in kinds_of(self._cls).items():
            found[(name,)] = kind
            if kind.fields is not None:
                found |= {(name, inner): of for inner, of in kinds_of(kind.fields).items()}
        return found | {(name, inner): kind for name, kinds in self._other.items() for inner, kind in kinds.items()}

    def kind_of(self, path: Path) -> Kind:
        """Return the kind of the value at `path`."""
        if path[0] in self._other:
            return self._other[path[0]][path[1]] if len(path) > 1 else Kind(values=Kind(anything=True))
        kind = kinds_of(self._cls)[path[0]]
        return kind if len(path) == 1 or kind.fields is None else kinds_of(kind.fields)[path[1]]

    def _nested(self, path: Path) -> type | str | None:
        """Return the owner of the names below `path`; None if the value itself is plain."""
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
        """Return the values below the further name `name`."""
        return {path[1]: value for path, (value, _) in self._found.items() if path[0] == name and len(path) > 1}

    def arguments(self) -> Any:
        """Make the arguments from all values.

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
                raise ConfigurationError(f"{name} lacks {', '.join(absent)}. Write them too, or remove {name}.")

    def _placed(self, error: ConfigurationError) -> ConfigurationError:
        """Add the place of the value to `error`, whose text begins with the name and value of an argument."""
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
        raise ConfigurationError(shorten(str(error), 2000)) from error  # it lists all known names


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
    """Return the message for an unknown name, with a suggestion."""
    close = difflib.get_close_matches(shorten(name), list(known), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{where}: there is no {what} {shorten(name)}.{hint}"


def _refuse_code_only(value: Mapping[str, Any], place: Place) -> None:
    for key, item in value.items():
        if key in CODE_ONLY and item not in (False, None):
            raise place.inner(key).wrong(item, CODE_ONLY[key])


def _check_value(path: Path, value: Any, place: Place) -> None:
    """Check a value that the kind of its field allows, but that may not be plain."""
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
    """Check that options are plain values of the layer's parameters; the grammar reports an unknown layer later."""
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
    """Return the kind of each parameter that can be passed by name; without an annotation it takes any plain value."""
    try:
        hints = get_type_hints(bound_init(function))
    except Exception:  # an annotation has a name that is imported only for type checkers
        hints = {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: Kind.of(hints.get(name, Any))
        for name, parameter in inspect.signature(bound_init(function)).parameters.items()
        if parameter.kind in named
    }


def bound_init(function: Any) -> Any:
    """Return `function`, or `__init__` of a class: Python 3.10 has the signature of `__new__` for an inherited one."""
    return MethodType(function.__init__, function) if isinstance(function, type) else function  # type: ignore[misc]


def is_plain(value: Any) -> bool:
    """Whether a file can hold `value`. Enums and numbers of numpy do not count: the file would change their class."""
    if type(value) is list:
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    return value is None or type(value) in (str, bool, int, float)
