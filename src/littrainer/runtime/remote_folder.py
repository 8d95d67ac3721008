"""Folders at an address, such as s3://bucket/run, and the folders on this machine that stand for them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote

# As fsspec writes addresses, chained ones too.
ADDRESS = re.compile(r"([A-Za-z][\w+.:-]*)://(.*)", re.DOTALL)
# A user with a password, or a user alone, except where a container comes before the @.
NO_CONTAINER = r"(?<!abfs://)(?<!abfss://)(?<!wasb://)(?<!wasbs://)(?<!oci://)"
SIGN_IN = re.compile(rf"(?<=://)(?:[^/\s@]*:[^/\s]*|{NO_CONTAINER}[^/\s]*)@")
MAX_TRIES = 3
MAX_NAME_BYTES, MAX_KEY_BYTES = 255, 1024
# Clients of fsspec take names with these for patterns, and delete all that match.
PATTERN = re.compile(r"[*?\[]")
ADVICE = "Give an address whose client is installed, such as s3://bucket/run (pip install s3fs), or a folder's path."


def local_folder(path: str) -> str:
    """Return the folder on this machine that stands for an address; return any other path as it is."""
    path = strip_credentials(path)
    # C:/ is a drive.
    if re.match(r"\w{2,}:/[^/]", path):
        raise ValueError(f"{path!r} is an address of which pathlib took a slash: give it as text, not as a Path.")
    match = ADDRESS.fullmatch(path)
    if match is None:
        return path
    protocol, (host, *parts) = match[1], match[2].rstrip("/").split("/")
    if not (host or parts) or PATTERN.search(path) or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"output_dir={path!r} is no address of a folder, without *, ? and [. {ADVICE}")
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise type(error)(f"output_dir={path!r} cannot be used: {error}. {ADVICE}") from error
    return str(_staging_folder().joinpath(quote(f"{protocol}://{host}", safe=""), *parts))


def strip_credentials(path: str) -> str:
    """Return an address without user, password and query, with which this process opens it; any other path as it is."""
    address, _, query = SIGN_IN.sub("", path).partition("?")
    match = ADDRESS.fullmatch(path)
    if match is None or match[1] in ("file", "local", "memory") or address == path:
        return path
    sign_in = SIGN_IN.search(path)
    RemoteFolder.given[address.rstrip("/")] = sign_in[0] if sign_in else "", query and f"?{query}"
    return address


def is_inside(name: str) -> bool:
    """Return whether there can be a file of this name in any folder, and it is in that folder."""
    parts = (whole := name.encode("utf-8", "surrogatepass")).split(b"/")
    is_short = len(whole) <= MAX_KEY_BYTES and max(map(len, parts)) <= MAX_NAME_BYTES
    return is_short and b"\0" not in whole and {b"", b".", b".."}.isdisjoint(parts)


def get_remote_url(folder: str | Path) -> str | None:
    """Return the address that a local folder, or one below it, stands for; None if it stands for none."""
    staging, real = os.path.realpath(_staging_folder()), os.path.realpath(folder)
    if not real.startswith(staging + os.sep):
        return None
    host, *parts = Path(real).relative_to(staging).parts
    return "/".join((unquote(host), *parts))


def _staging_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, "littrainer", "output")


class RemoteFolderError(RuntimeError):
    """Something at the address of a run could not be read or written; the message names it."""


class RemoteFolder:
    """The objects below an address, by their names relative to it.

    Each method raises RemoteFolderError, with the name of the object, if the address does not do what it is asked for.
    """

    written = 0  # Objects, by this process.
    # User and password, and the query, with which this process was given an address, by the address.
    given: ClassVar[dict[str, tuple[str, str]]] = {}

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self.address = address
        protocol, _, place = address.partition("://")
        if PATTERN.search(address):
            raise RemoteFolderError(f"{address} would be taken for a pattern: leave out *, ? and [.")
        # An address below it, such as that of a checkpoint, may have been given instead.
        near = [key for key in self.given if f"{key}/".startswith(f"{address}/") or address.startswith(f"{key}/")]
        nearest = min(near, key=lambda key: abs(len(key) - len(address)), default="")
        self._sign_in, self._query = self.given.get(nearest, ("", ""))
        self._files: Any = None
        with self._naming("", "opened"):
            self._files, root = url_to_fs(f"{protocol}://{self._sign_in}{place}{self._query}")
            self._root = root.removesuffix(self._query)

    def read(self, name: str) -> bytes | None:
        """Return what an object holds; None if it does not exist."""
        return self._whole(name, self._files.cat_file, len)

    def download(self, name: str, target: Path) -> None:
        """Download an object into a file, if it exists."""

        def get(path: str) -> Path:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(path, str(target))
            return target

        self._whole(name, get, lambda path: path.stat().st_size)

    def download_all(self, name: str, target: Path) -> list[str]:
        """Download all below a name; return the names that lead out of it, of which nothing is downloaded."""
        below, paths = f"{self._root}/{name}", []
        with self._naming(name, "listed", FileNotFoundError):
            paths = [path for path in self._files.find(below) if not path.endswith("/")]
        # A name that is not below it keeps its slash in front.
        inner = [f"/{path.lstrip('/')}".removeprefix(f"/{below.lstrip('/')}/") for path in paths]
        for file in filter(is_inside, inner):
            self.download(f"{name}/{file}", target / file)
        return [file for file in inner if not is_inside(file)]

    def _whole(self, name: str, read: Callable[[str], Any], length: Callable[[Any], int]) -> Any:
        """Return what is read of an object, again if that is less than there is; None if it does not exist."""
        for _ in range(MAX_TRIES):
            content = size = None
            with self._naming(name, "read", FileNotFoundError):
                content = read(f"{self._root}/{name}")
                size = self._files.info(f"{self._root}/{name}").get("size")
            if content is None or size is None or (came := length(content)) >= size:
                return content
        raise RemoteFolderError(f"{self.address}/{name} could not be read whole: {came:,} of its {size:,} bytes came.")

    def write(self, name: str, content: bytes | Path) -> None:
        """Write an object, of bytes or of a local file, and compare its size; a log may grow meanwhile."""
        path = f"{self._root}/{name}"
        if isinstance(content, Path):
            written, put = content.stat().st_size, functools.partial(self._files.put_file, str(content), path)
        else:
            written, put = len(content), functools.partial(self._files.pipe_file, path, content)
        with self._naming(name, "written"):
            try:
                put()
            except FileNotFoundError:
                # Folders have to be made on some file systems; on object stores it would be a bucket.
                if self._files.async_impl:
                    raise
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                put()
            self._files.invalidate_cache()
            size = self._files.info(path).get("size")
        if size is not None and (size < written or (isinstance(content, bytes) and size != written)):
            raise RemoteFolderError(f"{self.address}/{name} has {size:,} bytes after {written:,} were written to it.")
        RemoteFolder.written += 1

    def delete(self, name: str, is_folder: bool = False) -> None:
        """Delete an object, or all below a name, if there is any."""
        with self._naming(name, "deleted", FileNotFoundError):
            path = f"{self._root}/{name}"
            self._files.rm(path, recursive=True) if is_folder else self._files.rm_file(path)

    def listed(self) -> list[str]:
        """Return the names that a listing shows, of objects and folders."""
        with self._naming("", "listed", FileNotFoundError):
            return [path.rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
        return []

    @contextlib.contextmanager
    def _naming(self, name: str, done: str, ignored: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        try:
            if self._files is not None:
                # Some clients remember what they saw before.
                self._files.invalidate_cache()
            yield
        except ignored:
            pass
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        # Clients raise errors of their own kinds, such as asyncio's CancelledError, which is no Exception.
        except BaseException as error:
            where = f"{self.address}/{name}".rstrip("/")
            shown = str(error).replace(self._sign_in, "").replace(self._query, "")
            # A traceback would show credentials in the text of the cause.
            cause = None if self._sign_in or self._query else error
            raise RemoteFolderError(f"{where} could not be {done} ({type(error).__name__}: {shown}).") from cause
