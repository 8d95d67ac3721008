"""Folders at an address, such as s3://bucket/run, and the folders on this machine that stand for them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

# As fsspec writes addresses, chained ones too.
ADDRESS = re.compile(r"([A-Za-z][\w+.:-]*)://(.*)", re.DOTALL)
ADVICE = "Give an address whose client is installed, such as s3://bucket/run (pip install s3fs), or a folder's path."


def local_folder(path: str) -> str:
    """Return the folder on this machine that stands for an address; return any other path as it is.

    Raises:
        ImportError: the package that reads and writes such addresses is not installed.
        ValueError: it is no address of a folder.
    """
    # C:/ is a drive.
    if re.match(r"\w{2,}:/[^/]", path):
        raise ValueError(f"{path!r} is an address of which pathlib took a slash: give it as text, not as a Path.")
    match = ADDRESS.fullmatch(path)
    if match is None:
        return path
    protocol, (host, *parts) = match[1], match[2].rstrip("/").split("/")
    if not (host or parts) or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"output_dir={path!r} is no address of a folder. {ADVICE}")
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise type(error)(f"output_dir={path!r} cannot be used: {error}. {ADVICE}") from error
    return str(_staging_folder().joinpath(quote(f"{protocol}://{host}", safe=""), *parts))


def address_of(folder: str | Path) -> str | None:
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

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address
        self._files: Any = None
        with self._naming("", "opened"):
            self._files, self._root = fsspec.url_to_fs(address)

    def read(self, name: str) -> bytes | None:
        """Return what an object holds; None if it does not exist."""
        with self._naming(name, "read", FileNotFoundError):
            return self._files.cat_file(f"{self._root}/{name}")
        return None

    def fetch(self, name: str, target: Path) -> None:
        """Download an object into a file, or all below a name that ends in a slash into a folder, if it exists."""
        target.parent.mkdir(parents=True, exist_ok=True)
        get = functools.partial(self._files.get, recursive=True) if name.endswith("/") else self._files.get_file
        with self._naming(name, "read", FileNotFoundError):
            get(f"{self._root}/{name}", str(target))

    def write(self, name: str, content: bytes | Path) -> None:
        """Write an object, of bytes or of a local file, and compare its size; a log may grow meanwhile.

        Raises:
            FileNotFoundError: the local file does not exist.
        """
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
        if size is not None and size < written:
            raise RemoteFolderError(f"{self.address}/{name} has {size:,} bytes after {written:,} were written to it.")
        RemoteFolder.written += 1

    def delete(self, name: str) -> None:
        """Delete an object, or all below a name, if there is any."""
        with self._naming(name, "deleted", FileNotFoundError):
            self._files.rm(f"{self._root}/{name}", recursive=True)

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
        # Clients raise errors of their own kinds.
        except Exception as error:
            where = f"{self.address}/{name}".rstrip("/")
            raise RemoteFolderError(f"{where} could not be {done} ({type(error).__name__}: {error}).") from error
