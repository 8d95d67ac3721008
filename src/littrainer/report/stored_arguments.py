"""What training_args.bin says, read without running anything that stands in it, and without torch.

The file is a pickle within a zip archive. Classes and functions that it names are neither imported nor called: inert
stand-ins take their places, and keep what they were given.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import zipfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from littrainer.arguments.earlier_names import EARLIER_NAMES
from littrainer.arguments.fields import ArgumentFields, GenerationFields
from littrainer.arguments.normalization import normalize
from littrainer.arguments.secrets import holds_a_secret, without_secrets

# Training arguments take a few kilobytes; whatever is far larger is something else.
LARGEST_FILE_BYTES = 4 * 2**20
MOST_NAMES = 1000
# Numbers from here on can be chosen so that all hash alike.
LARGEST_KEY = 2**61 - 1
LONGEST_VALUE = 300
DEEPEST_VALUE = 6
MOST_ENTRIES = 200
# Defaults of earlier releases that ask for what today's default asks for.
EARLIER_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "trackio_space_id": ("trackio",),
    "fsdp_config": ({"min_num_params": 0},),
    "warmup_ratio": (0.0,),
}
# Names that releases store beside the arguments, and that are no arguments.
NO_ARGUMENTS = frozenset(
    {
        "mixed_precision",
        "distributed_state",
        "fsdp_plugin_args",
        "deepspeed_plugin",
        "hf_deepspeed_config",
        "local_rank",
    }
)


class Unreadable(Exception):
    """The file holds no training arguments that can be read safely; the message is the reason."""


class Entries(dict[Any, Any]):
    """A dict whose keys cannot make it hang: nested tuples take for ever to hash, and chosen numbers hash alike.

    A key of such a kind is kept within a stand-in.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = key is None or isinstance(key, str | bytes | float | StandIn | type)
        small = isinstance(key, int) and abs(key) < LARGEST_KEY
        super().__setitem__(key if plain or small else StandIn(key), value)


class StandIn:
    """Takes the place of an object of a class that a file names, and does nothing."""

    module = name = ""

    def __new__(cls, *given: Any, **keywords: Any) -> StandIn:
        made = super().__new__(cls)
        made.given = given
        made.items = Entries()
        made.state = None
        return made

    given: tuple[Any, ...]
    items: Entries
    state: Any

    def __init__(self, *given: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *given: Any, **keywords: Any) -> StandIn:
        return StandIn(*given)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value


# The reader that is written in Python: the one in C takes memory as a file bids it.
_PythonUnpickler: Any = pickle._Unpickler
# What a pickle of arguments is made of. Left out are sets, which hash what they hold, what takes numbers or memory of
# any size, and what only the earliest pickles have.
OPERATIONS = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPERSID),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.BUILD),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINSTRING, pickle.SHORT_BINSTRING),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
)


class _Operations(dict[int, Any]):
    def __missing__(self, operation: int) -> Any:
        raise pickle.UnpicklingError(f"arguments have no need of its operation {operation:#x}")


def _start_dict(reader: Any) -> None:
    reader.append(Entries())


class _InertUnpickler(_PythonUnpickler):
    dispatch = _Operations({operation[0]: _PythonUnpickler.dispatch[operation[0]] for operation in OPERATIONS})
    dispatch[pickle.EMPTY_DICT[0]] = _start_dict
    names = 0

    def find_class(self, module: str, name: str) -> type[StandIn]:
        self.names += 1
        if self.names > MOST_NAMES:
            raise pickle.UnpicklingError(f"it names more than {MOST_NAMES} classes")
        return type("Named", (StandIn,), {"module": str(module), "name": str(name)})

    def persistent_load(self, identity: Any) -> Any:
        # A tensor, say; its numbers stand elsewhere in the archive.
        return StandIn()


def read_arguments(path: Path) -> dict[str, str]:
    """The arguments in a training_args.bin, each as text, without secrets.

    Raises:
        Unreadable: it is no such file, or damaged.
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise Unreadable(f"it holds more than {LARGEST_FILE_BYTES} bytes, too many for training arguments")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            inside = next(entry for entry in archive.infolist() if entry.filename.endswith("data.pkl"))
            # torch never compresses, and a few compressed bytes can unfold to any number of them.
            if inside.compress_type != zipfile.ZIP_STORED:
                raise Unreadable("it is compressed, which torch does not do")
            stored = _InertUnpickler(io.BytesIO(archive.read(inside))).load()
        return _texts_of(stored)
    except (OSError, Unreadable):
        raise
    except StopIteration:
        raise Unreadable("it is an archive of another kind") from None
    except zipfile.BadZipFile:
        raise Unreadable("it is damaged, or was written by torch 1.5 or earlier") from None
    # A damaged or harmful pickle makes the reader fail in any way.
    except Exception as error:
        raise Unreadable(f"it is damaged ({type(error).__name__}: {_short(str(error))})") from None


def _texts_of(stored: Any) -> dict[str, str]:
    if not isinstance(stored, StandIn) or not isinstance(stored.state, dict):
        raise Unreadable("it holds no training arguments")
    return {
        name: "(hidden)" if holds_a_secret(name) and value is not None else as_text(value)
        for name, value in stored.state.items()
        if isinstance(name, str) and not name.startswith("_") and name not in NO_ARGUMENTS
    }


@dataclasses.dataclass(frozen=True)
class Changed:
    """Arguments away from their defaults.

    Parameters:
        given: those that are known here, in their documented order.
        defaults: the default of each of them.
        unknown: arguments of a subclass or of another release, whose defaults are not known here.
    """

    given: dict[str, str]
    defaults: dict[str, str]
    unknown: dict[str, str]


def changed_arguments(stored: Mapping[str, str]) -> Changed:
    """Tell which stored arguments are away from their defaults; output_dir always is."""
    usual = usual_arguments()
    given = {name: stored[name] for name in usual if name in stored and not _is_usual(name, stored[name], usual[name])}
    unknown = {
        name: value
        for name, value in stored.items()
        if name not in usual and not (name in EARLIER_NAMES and value in _texts(EARLIER_NAMES[name].idle))
    }
    return Changed(given, {name: usual[name] for name in given}, unknown)


def usual_arguments() -> dict[str, str]:
    """The default of every documented argument, as it is stored, as text."""
    args = ArgumentFields()
    normalize(args, ())
    generation = {field.name: field.default for field in dataclasses.fields(GenerationFields)}
    return {name: as_text(value) for name, value in {**vars(args), **generation, "output_dir": None}.items()}


def _is_usual(name: str, value: str, usual: str) -> bool:
    return any(same(value, each) for each in (usual, *_texts(EARLIER_DEFAULTS.get(name, ()))))


def same(one: str, other: str) -> bool:
    """Whether two values mean the same: 3 and 3.0 do, and all ways to say nothing."""
    if one == other or {one, other} <= {"None", "[]", "{}", ""}:
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def _texts(values: tuple[Any, ...]) -> list[str]:
    return [as_text(value) for value in values]


def as_text(value: Any, depth: int = 0) -> str:
    """A value as one line: choices by their values, configurations by what is set in them, never longer than a line."""
    if isinstance(value, str) and depth == 0:
        return _short(value)
    if depth > DEEPEST_VALUE:
        return "..."
    if isinstance(value, StandIn):
        return _stand_in_text(value, depth)
    if isinstance(value, dict):
        return _dict_text(value, depth)
    if isinstance(value, list | tuple | set | frozenset):
        return _short(f"[{', '.join(_until_long(as_text(item, depth + 1) for item in value))}]")
    if hasattr(value, "to_dict"):
        return as_text(value.to_dict(), depth)
    return _short(str(value.value) if hasattr(value, "value") else repr(value))


def _stand_in_text(value: StandIn, depth: int) -> str:
    content = value.state if isinstance(value.state, dict) else value.items
    if content:
        return _dict_text(content, depth)
    if len(value.given) == 1:
        return as_text(value.given[0], depth)
    return as_text(list(value.given), depth) if value.given else value.name or "..."


def _dict_text(content: dict[Any, Any], depth: int) -> str:
    entries = (
        f"{key}: {'(hidden)' if holds_a_secret(key) else as_text(value, depth + 1)}"
        for key, value in ((as_text(key), value) for key, value in islice(content.items(), MOST_ENTRIES))
        # What is off or absent stands for itself.
        if value is not None and value is not False
    )
    return _short("{" + ", ".join(_until_long(entries)) + "}")


def _until_long(texts: Any) -> list[str]:
    """As many of the texts as fit into a line: shared objects can make a small file a text without end."""
    taken: list[str] = []
    length = 0
    for text in texts:
        taken.append(text)
        length += len(text)
        if length > LONGEST_VALUE:
            break
    return taken


def _short(text: str) -> str:
    text = without_secrets(" ".join(text.split()))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
