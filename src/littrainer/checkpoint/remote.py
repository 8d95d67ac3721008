"""A run whose output_dir is an address: its local folder is uploaded behind the training, and fetched for a resume.

A checkpoint's manifest is uploaded last and deleted first, so a checkpoint is complete at the address or not there.
Neither a listing nor a time decides: what has a readable manifest exists, and the highest step is the newest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

from littrainer.checkpoint.atomic_write import PART, UNFINISHED_DIR, delete_checkpoint, delete_folder, in_use
from littrainer.checkpoint.checksums import MANIFEST_NAME, DamagedManifest, Manifest, parsed_manifest
from littrainer.checkpoint.layout import TRAINER_STATE_NAME, checkpoint_step
from littrainer.checkpoint.verification import damage_in, readable_manifest
from littrainer.errors.atomic_files import write_whole
from littrainer.errors.remote_folder import RemoteFolder, RemoteFolderError, address_of

logger = logging.getLogger(__name__)

# At the address: the run that uploads there, and the checkpoints that are complete, which a listing may miss.
MARKER_NAME = ".littrainer_running.json"
# In the local folder: the sums of the manifests that were uploaded from it, by the checkpoints' names.
UPLOADED_NAME = ".littrainer_uploaded.json"
SECONDS_BETWEEN_LINES = 30.0


def _highest_first(paths: Iterable[object]) -> list[str]:
    """Return the names of those that are checkpoints, once each, the highest step first."""
    steps = {Path(str(path)).name: checkpoint_step(str(path)) for path in paths}
    return sorted((name for name, step in steps.items() if step is not None), key=lambda name: -(steps[name] or 0))


class RemoteRun:
    """A run at an address, and the local folder that stands for it.

    Attributes:
        complete: the manifests of the checkpoints that are complete at the address, by name.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.remote = folder, RemoteFolder(str(address_of(folder)))
        self.complete: dict[str, bytes] = {}
        self._identity = {"run": uuid.uuid4().hex, "holder": f"process {os.getpid()} on {socket.gethostname()}"}
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix=f"uploading to {self.remote.address}")
        self._work: futures.Future[None] | None = None

    def local_checkpoints(self) -> list[str]:
        """Return the names of the checkpoints in the local folder, the highest step first."""
        return _highest_first(entry for entry in self.folder.iterdir() if entry.is_dir())

    def survey(self) -> None:
        """Find out what is complete at the address, and bring the local folder into line with it.

        A checkpoint that is only there gets a local folder with its manifest, so that it counts when older ones are
        rotated. One that was uploaded from here and is no longer there is deleted, or set aside if there is no other.
        """
        local, absent, self.complete = self.local_checkpoints(), [], {}
        for name in _highest_first([*self.remote.listed(), *self._marker().get("checkpoints", []), *local]):
            content = self.remote.read(f"{name}/{MANIFEST_NAME}")
            if content is None:
                absent.append(self.folder / name)
            elif _parsed(content) is not None:
                self.complete[name] = content
            else:
                logger.warning("%s/%s does not count: its %s is torn.", self.remote.address, name, MANIFEST_NAME)
        uploaded = _fields_of(_content_of(self.folder / UPLOADED_NAME))
        for folder in absent:
            if uploaded.get(folder.name) == zlib.crc32(_content_of(folder / MANIFEST_NAME) or b""):
                logger.warning("%s/%s was deleted there, so %s goes too.", self.remote.address, folder.name, folder)
                if self.complete:
                    delete_checkpoint(str(folder))
                    continue
                # Another process of this machine may look at the same time.
                with contextlib.suppress(OSError):
                    delete_folder(aside := folder.with_name(f".deleted-{folder.name}"))
                    folder.rename(aside)
        for name in self.complete.keys() - local:
            (self.folder / name).mkdir(exist_ok=True)
            write_whole(self.folder / name / MANIFEST_NAME, self.complete[name])

    def bring(self, name: str) -> bool:
        """Download a checkpoint unless it is here; return whether it is here, and intact."""
        local, expected = self.folder / name, self.complete.get(name)
        if expected is None or _content_of(local / MANIFEST_NAME) == expected:
            is_intact = not damage_in(local)
            if is_intact or expected is None:
                return is_intact
        part = self.folder / UNFINISHED_DIR / f"{name}{PART}{os.getpid()}"
        logger.info("Downloading %s/%s to %s", self.remote.address, name, local)
        try:
            for file in parsed_manifest(expected).files:
                self.remote.fetch(f"{name}/{file}", part / file)
            (part / MANIFEST_NAME).write_bytes(expected)
            if damage := damage_in(part):
                logger.warning("Passing over %s/%s, which is damaged: %s", self.remote.address, name, " ".join(damage))
                return False
            # Another process of this machine may bring it at the same time.
            with contextlib.suppress(OSError):
                delete_folder(local)
                part.rename(local)
            return _content_of(local / MANIFEST_NAME) == expected
        finally:
            shutil.rmtree(part, ignore_errors=True)
            with contextlib.suppress(OSError):
                part.parent.rmdir()

    def claim(self) -> None:
        """Begin to be the run that uploads there; whether another one is alive cannot be known without locks."""
        if holder := self._marker().get("holder"):
            logger.warning("%s is taken over from %s, which has not said that it ended.", self.remote.address, holder)
        self.survey()
        self._note()
        self._refuse_if_taken_over()

    def end(self) -> None:
        """Stop being the run that uploads there."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(RemoteFolderError):
            self._refuse_if_taken_over()
            self._identity["holder"] = ""
            self._note()

    def begin(self) -> None:
        """Begin to upload what has changed, or do it after what is on its way."""
        # What has not begun uploads this too.
        if self._work is None or self._work.running() or self._work.done():
            self._work = self._thread.submit(self._upload_or_warn)

    def finish(self) -> None:
        """Wait for what is on its way, and upload what is left.

        Raises:
            RemoteFolderError: not all could be uploaded, tried twice.
        """
        while self._work is not None and futures.wait([self._work], SECONDS_BETWEEN_LINES).not_done:
            logger.warning("Waiting for the upload of %s to %s.", self.folder, self.remote.address)
        for is_last in (False, True):
            try:
                return self._upload_all()
            except Exception as error:
                if is_last:
                    raise RemoteFolderError(
                        f"{error} Not all of this run is at {self.remote.address}. All of it is in {self.folder}, and "
                        "the next training on this machine with the same output_dir uploads it."
                    ) from error
                logger.warning("%s It is tried once more.", error)

    def _upload_or_warn(self) -> None:
        try:
            self._upload_all()
        except Exception as error:
            logger.warning("%s Training goes on, and the next save uploads it again.", error)

    def _upload_all(self) -> None:
        self._refuse_if_taken_over()
        while (name := self._next_to_upload()) is not None:
            # It may be thinned meanwhile.
            with contextlib.suppress(FileNotFoundError), in_use(self.folder / name):
                self._upload(name)
        send_files(self.folder)
        # Nothing older is deleted before the newest one is safe.
        local = self.local_checkpoints()
        if local and local[0] in self.complete:
            for name in {*_highest_first(self.remote.listed()), *self.complete}.difference(local):
                self._refuse_if_taken_over()
                self.complete.pop(name, None)
                # The rest of it is no checkpoint without this.
                self.remote.delete(f"{name}/{MANIFEST_NAME}")
                self.remote.delete(name)
                self._note()

    def _next_to_upload(self) -> str | None:
        for name in self.local_checkpoints():
            content = _content_of(self.folder / name / MANIFEST_NAME)
            manifest = _parsed(content)
            if manifest is None or self.complete.get(name) == content:
                continue
            # Of one that is at the address alone the manifest is here.
            if all((self.folder / name / file).is_file() for file in manifest.files):
                return name
        return None

    def _upload(self, name: str) -> None:
        content = (self.folder / name / MANIFEST_NAME).read_bytes()
        now, before = parsed_manifest(content).files, _parsed(self.complete.get(name))
        there = {} if before is None else before.files
        changed = [file for file in now if there.get(file) != now[file]]
        if changed:
            self.complete.pop(name, None)
            self.remote.delete(f"{name}/{MANIFEST_NAME}")
        try:
            for file in changed:
                self.remote.write(f"{name}/{file}", self.folder / name / file)
        except RemoteFolderError:
            if _content_of(self.folder / name / MANIFEST_NAME) == content:
                raise
        if _content_of(self.folder / name / MANIFEST_NAME) != content:
            return
        self._refuse_if_taken_over()
        self.remote.write(f"{name}/{MANIFEST_NAME}", content)
        for file in there.keys() - now.keys():
            self.remote.delete(f"{name}/{file}")
        self.complete[name] = content
        self._note()
        logger.info("Uploaded %s to %s", self.folder / name, self.remote.address)

    def _refuse_if_taken_over(self) -> None:
        marker = self._marker()
        if marker.get("run", self._identity["run"]) != self._identity["run"]:
            raise RemoteFolderError(
                f"{self.remote.address}/{MARKER_NAME} says that another run, {marker.get('holder')}, began to upload "
                "there. Two runs there would delete each other's checkpoints, so this one uploads nothing more."
            )

    def _marker(self) -> dict[str, Any]:
        return _fields_of(self.remote.read(MARKER_NAME))

    def _note(self) -> None:
        marker = {**self._identity, "checkpoints": _highest_first(self.complete)}
        self.remote.write(MARKER_NAME, json.dumps(marker, indent=1).encode())
        sums = {name: zlib.crc32(content) for name, content in self.complete.items()}
        write_whole(self.folder / UPLOADED_NAME, json.dumps(sums, indent=1))


def _content_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _parsed(content: bytes | None) -> Manifest | None:
    """Return a manifest; None if there is none, it is torn, or it names files outside of the checkpoint."""
    try:
        manifest = None if content is None else parsed_manifest(content)
    except DamagedManifest:
        return None
    names = () if manifest is None else manifest.files
    return None if any(name.startswith("/") or ".." in name.split("/") for name in names) else manifest


def _fields_of(content: bytes | None) -> dict[str, Any]:
    """Return what is in a JSON object; nothing if it is torn or does not exist."""
    with contextlib.suppress(ValueError):
        fields = json.loads(content or b"{}")
        return fields if isinstance(fields, dict) else {}
    return {}


# ---- What a training, a resume and a report call ---------------------------------------------------------------------

# The runs that this process uploads, by their local folders.
_uploaded: dict[Path, RemoteRun] = {}
# Size and modification time of files outside of checkpoints when this process uploaded them last.
_sent: dict[Path, tuple[int, int]] = {}


@contextlib.contextmanager
def uploaded_run(folder: Path) -> Iterator[RemoteRun | None]:
    """Upload what is saved in the local folder of a run at an address during the block.

    A block that ends without an error ends with `finish` of what it is given.

    Raises:
        RemoteFolderError: nothing can be written there.
    """
    # A training inside of another one in its folder uploads nothing by itself.
    if folder.resolve() in _uploaded:
        yield None
        return
    run = RemoteRun(folder)
    logger.info("Checkpoints are written to %s and uploaded to %s", folder, run.remote.address)
    run.claim()
    _uploaded[folder.resolve()] = run
    try:
        yield run
    except BaseException as error:
        if not isinstance(error, RemoteFolderError):
            logger.warning("Uploading what is left to %s before the error ends this run.", run.remote.address)
            try:
                run.finish()
            except RemoteFolderError as failure:
                logger.error("%s", failure)
        raise
    finally:
        del _uploaded[folder.resolve()]
        run.end()


def begin_uploads(folder: Path) -> None:
    """Begin to upload what has changed in the folder of a run, if this process uploads it."""
    if (run := _uploaded.get(folder.resolve())) is not None:
        run.begin()


def send_files(folder: Path | str) -> None:
    """Upload what has changed in a folder, except for checkpoints, if an address stands behind it.

    Raises:
        RemoteFolderError: a file could not be uploaded.
    """
    if (address := address_of(folder)) is None:
        return
    remote = RemoteFolder(address)
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and checkpoint_step(name) is None]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            # A callback may delete one meanwhile.
            with contextlib.suppress(FileNotFoundError):
                stamp = path.stat().st_size, path.stat().st_mtime_ns
                if _sent.get(path.resolve()) != stamp:
                    remote.write(path.relative_to(folder).as_posix(), path)
                    _sent[path.resolve()] = stamp


def fetch_newest(folder: Path | str) -> None:
    """Bring the newest checkpoint at an address, and the best one that it names, to the folder that stands for it.

    Raises:
        RemoteFolderError: an object could not be read.
    """
    run = RemoteRun(Path(folder))
    run.survey()
    for name in _highest_first([*run.complete, *run.local_checkpoints()]):
        manifest = _parsed(run.complete.get(name)) or readable_manifest(run.folder / name)
        if not manifest.is_thinned and manifest.weights_are_finite is not False and run.bring(name):
            state = _fields_of(_content_of(run.folder / name / TRAINER_STATE_NAME))
            if (best := Path(state.get("best_model_checkpoint") or "").name) in run.complete:
                run.bring(best)
            return


def fetch_checkpoint(folder: Path) -> None:
    """Bring one checkpoint from an address to the local folder that stands for it, unless it is there.

    Raises:
        RemoteFolderError: an object could not be read.
    """
    if folder.is_dir() and not damage_in(folder):
        return
    run = RemoteRun(folder.parent)
    content = run.remote.read(f"{folder.name}/{MANIFEST_NAME}")
    if content is not None and _parsed(content) is not None:
        run.complete[folder.name] = content
        run.bring(folder.name)


def fetch_small_files(folder: Path, names: Collection[str]) -> None:
    """Bring files of a run, and of its newest checkpoint, from an address to the local folder that stands for it.

    Raises:
        RemoteFolderError: an object could not be read.
    """
    run = RemoteRun(folder)
    run.survey()
    for place in ["", *(f"{name}/" for name in _highest_first(run.complete)[:1])]:
        for name in names:
            run.remote.fetch(f"{place}{name}", folder / place / name)
