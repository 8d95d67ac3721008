"""Remote folders, such as s3://bucket/run, and their local staging folders."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote

# URLs of fsspec, including chained URLs.
URL = re.compile(r"([A-Za-z][\w+.:-]*)://(.*)", re.DOTALL)
# User and password, or a user alone, except for protocols with a container in front of the @.
NO_CONTAINER = r"(?<!abfs://)(?<!abfss://)(?<!wasb://)(?<!wasbs://)(?<!oci://)"
CREDENTIALS = re.compile(rf"(?<=://)(?:[^/\s@]*:[^/\s]*|{NO_CONTAINER}[^/\s]*)@")
MAX_TRIES = 3
MAX_NAME_BYTES = 255
MAX_KEY_BYTES = 1024
# Characters of patterns, for which fsspec would delete all matches.
PATTERN = re.compile(r"[*?\[]")
URL_HINT = "Give an address whose client is installed, such as s3://bucket/run (pip install s3fs), or a folder's path."


def local_folder(path: str) -> str:
    """Return the local staging folder of a URL, or any other path unchanged."""
    path = strip_credentials(path)
    # Not C:/, which is a drive.
    if re.match(r"\w{2,}:/[^/]", path):
        raise ValueError(f"{path!r} is an address of which pathlib took a slash: give it as text, not as a Path.")
    match = URL.fullmatch(path)
    if match is None:
        return path
    protocol, (host, *parts) = match[1], match[2].rstrip("/").split("/")
    if not (host or parts) or PATTERN.search(path) or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"output_dir={path!r} is no address of a folder, without *, ? and [. {URL_HINT}")
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise type(error)(f"output_dir={path!r} cannot be used: {error}. {URL_HINT}") from error
    return str(_staging_folder().joinpath(quote(f"{protocol}://{host}", safe=""), *parts))


def strip_credentials(path: str) -> str:
    """Return a URL without user, password and query, which are stored for this process."""
    url, _, query = CREDENTIALS.sub("", path).partition("?")
    match = URL.fullmatch(path)
    if match is None or match[1] in ("file", "local", "memory") or url == path:
        return path
    credentials = CREDENTIALS.search(path)
    RemoteFolder.credentials[url.rstrip("/")] = credentials[0] if credentials else "", query and f"?{query}"
    return url


def is_inside(name: str) -> bool:
    """Return whether a relative name is valid and stays inside its folder."""
    parts = (path := name.encode("utf-8", "surrogatepass")).split(b"/")
    is_short = len(path) <= MAX_KEY_BYTES and max(map(len, parts)) <= MAX_NAME_BYTES
    return is_short and b"\0" not in path and {b"", b".", b".."}.isdisjoint(parts)


def get_remote_url(folder: str | Path) -> str | None:
    """Return the URL of a staging folder, or of a folder in it."""
    staging, real = os.path.realpath(_staging_folder()), os.path.realpath(folder)
    if not real.startswith(staging + os.sep):
        return None
    host, *parts = Path(real).relative_to(staging).parts
    return "/".join((unquote(host), *parts))


def _staging_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, "littrainer", "output")


class RemoteFolderError(RuntimeError):
    """An error of reading or writing a remote object, which the message names."""


class RemoteFolder:
    """Objects below a URL, by their relative names; failures raise RemoteFolderError."""

    # Objects that this process has written.
    written = 0
    # URL -> user and password, and query.
    credentials: ClassVar[dict[str, tuple[str, str]]] = {}

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url
        protocol, _, path = url.partition("://")
        if PATTERN.search(url):
            raise RemoteFolderError(f"{url} would be taken for a pattern: leave out *, ? and [.")
        # The credentials may belong to a URL above or below, such as a checkpoint's.
        urls = [key for key in self.credentials if f"{key}/".startswith(f"{url}/") or url.startswith(f"{key}/")]
        nearest = min(urls, key=lambda key: abs(len(key) - len(url)), default="")
        self._user_info, self._query = self.credentials.get(nearest, ("", ""))
        self._files: Any = None
        with self._convert_errors("", "opened"):
            self._files, root = url_to_fs(f"{protocol}://{self._user_info}{path}{self._query}")
            self._root = root.removesuffix(self._query)

    def read(self, name: str) -> bytes | None:
        return self._retry_if_truncated(name, self._files.cat_file, len)

    def download(self, name: str, target: Path) -> None:
        def get(path: str) -> Path:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(path, str(target))
            return target

        self._retry_if_truncated(name, get, lambda path: path.stat().st_size)

    def download_all(self, name: str, target: Path) -> list[str]:
        """Download all objects below a name; return names that lead outside, which are not downloaded."""
        prefix, paths = f"{self._root}/{name}", []
        with self._convert_errors(name, "listed", FileNotFoundError):
            paths = [path for path in self._files.find(prefix) if not path.endswith("/")]
        # Names outside keep their leading slash.
        names = [f"/{path.lstrip('/')}".removeprefix(f"/{prefix.lstrip('/')}/") for path in paths]
        for file in filter(is_inside, names):
            self.download(f"{name}/{file}", target / file)
        return [file for file in names if not is_inside(file)]

    def _retry_if_truncated(self, name: str, read: Callable[[str], Any], length: Callable[[Any], int]) -> Any:
        """Read an object, and retry if the result is shorter than its size; None if the object does not exist."""
        for _ in range(MAX_TRIES):
            content = size = None
            with self._convert_errors(name, "read", FileNotFoundError):
                content = read(f"{self._root}/{name}")
                size = self._files.info(f"{self._root}/{name}").get("size")
            if content is None or size is None or (received := length(content)) >= size:
                return content
        raise RemoteFolderError(f"{self.url}/{name} could not be read whole: {received:,} of its {size:,} bytes came.")

    def write(self, name: str, content: bytes | Path) -> None:
        """Upload bytes or a local file, which may grow meanwhile, and check the object's size."""
        path = f"{self._root}/{name}"
        if isinstance(content, Path):
            written, put = content.stat().st_size, functools.partial(self._files.put_file, str(content), path)
        else:
            written, put = len(content), functools.partial(self._files.pipe_file, path, content)
        with self._convert_errors(name, "written"):
            try:
                put()
            except FileNotFoundError:
                # Some file systems need folders; on object stores this would create a bucket.
                if self._files.async_impl:
                    raise
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                put()
            self._files.invalidate_cache()
            size = self._files.info(path).get("size")
        if size is not None and (size < written or (isinstance(content, bytes) and size != written)):
            raise RemoteFolderError(f"{self.url}/{name} has {size:,} bytes after {written:,} were written to it.")
        RemoteFolder.written += 1

    def delete(self, name: str, is_folder: bool = False) -> None:
        with self._convert_errors(name, "deleted", FileNotFoundError):
            path = f"{self._root}/{name}"
            self._files.rm(path, recursive=True) if is_folder else self._files.rm_file(path)

    def list_names(self) -> list[str]:
        with self._convert_errors("", "listed", FileNotFoundError):
            return [path.rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
        return []

    @contextlib.contextmanager
    def _convert_errors(self, name: str, done: str, ignored: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        try:
            if self._files is not None:
                # Some clients cache listings.
                self._files.invalidate_cache()
            yield
        except ignored:
            pass
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        # BaseException, since clients raise errors such as asyncio's CancelledError.
        except BaseException as error:
            where = f"{self.url}/{name}".rstrip("/")
            message = str(error).replace(self._user_info, "").replace(self._query, "")
            # The cause's text may contain credentials.
            cause = None if self._user_info or self._query else error
            raise RemoteFolderError(f"{where} could not be {done} ({type(error).__name__}: {message}).") from cause
