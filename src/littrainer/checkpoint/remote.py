"""A run whose output_dir is an address: its local folder is uploaded behind the training, and fetched for a resume.

A checkpoint's manifest is uploaded last and emptied first, so a checkpoint is complete at the address or not there.
Neither a listing nor a time decides: what has a readable manifest exists, and the highest step is the newest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import threading
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from littrainer.checkpoint.atomic_write import PART, UNFINISHED_DIR, delete_folder, delete_kept, keepers
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
# In the manifest of a checkpoint at the address that is being uploaded or deleted.
UNFINISHED = b""


def _highest_first(paths: Iterable[object]) -> list[str]:
    """Return the names of those that are checkpoints, once each, the highest step first."""
    steps = {Path(str(path)).name: checkpoint_step(str(path)) for path in paths}
    return sorted((name for name, step in steps.items() if step is not None), key=lambda name: -(steps[name] or 0))


class RemoteRun:
    """A run at an address, and the local folder that stands for it.

    Attributes:
        hang_timeout: seconds without an uploaded object after which `finish` fails; 0 if none.
        manifests: what they hold at the address, by the checkpoints' names; UNFINISHED if one is not complete.
        foreign: names of checkpoints at the address without a manifest, such as those of transformers.
        gone: names of local ones that were uploaded from here and are no longer at the address.
        kept: paths of local ones that are to be deleted if they no longer have to stay.
    """

    def __init__(self, folder: Path, hang_timeout: float = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.remote = folder, RemoteFolder(str(address_of(folder)))
        self.manifests: dict[str, bytes] = {}
        self.foreign, self.gone, self.kept = set[str](), set[str](), set[str]()
        self._identity = {"run": uuid.uuid4().hex, "holder": f"process {os.getpid()} on {socket.gethostname()}"}
        self.hang_timeout, self._is_asked = hang_timeout, False
        self._work: threading.Thread | None = None
        self._error: Exception | None = None

    def local_checkpoints(self) -> list[str]:
        """Return the names of the checkpoints in the local folder, the highest step first."""
        return _highest_first(entry for entry in self.folder.iterdir() if entry.is_dir())

    def survey(self) -> None:
        """Find out what is at the address."""
        listed = _highest_first(self.remote.listed())
        uploaded = _fields_of(_content_of(self.folder / UPLOADED_NAME))
        noted = _fields_of(self.remote.read(MARKER_NAME)).get("checkpoints", [])
        for name in _highest_first([*listed, *noted, *self.local_checkpoints()]):
            content = self.remote.read(f"{name}/{MANIFEST_NAME}")
            if content == UNFINISHED or _parsed(content) is not None:
                self.manifests[name] = content or UNFINISHED
            elif content is not None:
                logger.warning("%s/%s does not count: its %s is torn.", self.remote.address, name, MANIFEST_NAME)
            elif (own := _content_of(self.folder / name / MANIFEST_NAME)) and uploaded.get(name) == zlib.crc32(own):
                self.gone.add(name)
            elif name in listed:
                self.foreign.add(name)

    def bring(self, name: str) -> bool:
        """Download a checkpoint unless it is here; return whether it is here, and intact."""
        local, content = self.folder / name, self.remote.read(f"{name}/{MANIFEST_NAME}")
        manifest = _parsed(content)
        if (manifest is None or _content_of(local / MANIFEST_NAME) == content) and not damage_in(local):
            return True
        # It is being uploaded or deleted.
        if manifest is None and content is not None:
            return False
        part = self.folder / UNFINISHED_DIR / f"{name}{PART}{os.getpid()}"
        logger.info("Downloading %s/%s to %s", self.remote.address, name, local)
        try:
            for file in [""] if manifest is None else manifest.files:
                self.remote.fetch(f"{name}/{file}", part / file)
            # Our own files without the manifest are a part of a checkpoint.
            if not part.is_dir() or (content is None and any(part.glob("littrainer_*"))):
                return False
            if content is not None:
                (part / MANIFEST_NAME).write_bytes(content)
            if damage := damage_in(part):
                logger.warning("Passing over %s/%s, which is damaged: %s", self.remote.address, name, " ".join(damage))
                return False
            # Another process of this machine may bring it at the same time.
            with contextlib.suppress(OSError):
                delete_folder(local)
                part.rename(local)
            return _content_of(local / MANIFEST_NAME) == content
        finally:
            shutil.rmtree(part, ignore_errors=True)
            with contextlib.suppress(OSError):
                part.parent.rmdir()

    def claim(self) -> None:
        """Begin to be the run that uploads there; whether another one is alive cannot be known without locks.

        A checkpoint that is only there gets a local folder with its manifest, so that it counts when older ones are
        rotated. One that was uploaded from here and is no longer there is deleted, or set aside if there is no other.
        """
        if holder := _fields_of(self.remote.read(MARKER_NAME)).get("holder"):
            logger.warning("%s is taken over from %s, which has not said that it ended.", self.remote.address, holder)
        self.survey()
        for name in self.gone:
            logger.warning("%s/%s was deleted there, so it goes from %s too.", self.remote.address, name, self.folder)
            delete_folder(aside := self.folder / f".deleted-{name}")
            (self.folder / name).rename(aside)
            if any(self.manifests.values()):
                delete_folder(aside)
        if self.foreign:
            effect = "They are never deleted, and a new checkpoint of the same name replaces their files"
            logger.warning("%s: no manifest in %s. %s.", self.remote.address, ", ".join(sorted(self.foreign)), effect)
        for name, content in self.manifests.items():
            if content and not (self.folder / name).is_dir():
                (self.folder / name).mkdir()
                write_whole(self.folder / name / MANIFEST_NAME, content)
        self._note()
        self._refuse_if_taken_over()

    def end(self) -> None:
        """Stop being the run that uploads there."""
        # What hangs would hang here too.
        if self._work is None or not self._work.is_alive():
            with contextlib.suppress(RemoteFolderError):
                self._refuse_if_taken_over()
                self._identity["holder"] = ""
                self._note()

    def begin(self) -> threading.Thread:
        """Begin to upload what has changed, or do it after what is on its way."""
        self._is_asked = True
        if self._work is None or not self._work.is_alive():
            # It may hang, and a process that ends does not wait for a daemon.
            self._work = threading.Thread(target=self._upload_as_asked, name="littrainer uploads", daemon=True)
            self._work.start()
        return self._work

    def finish(self) -> None:
        """Wait for what is on its way, upload what is left, and delete what had to stay until then.

        Raises:
            RemoteFolderError: not all could be uploaded, tried twice, or nothing was for `hang_timeout`.
        """
        self._finish_uploads()
        if delete_kept():
            # They go from the address too.
            self._finish_uploads()

    def _finish_uploads(self) -> None:
        seconds = self.hang_timeout or SECONDS_BETWEEN_LINES
        for _ in range(2):
            work, written = self.begin(), -1
            while work.is_alive() and not (self.hang_timeout and written == RemoteFolder.written):
                written = RemoteFolder.written
                work.join(seconds)
                if work.is_alive():
                    logger.warning("Waiting for the upload of %s to %s.", self.folder, self.remote.address)
            if work.is_alive():
                self._error = TimeoutError(f"No object was uploaded for {seconds:g} s (hang_timeout).")
            # The thread may have ended just when it was asked.
            elif self._error is None and not self._is_asked:
                return
        raise RemoteFolderError(
            f"{self._error} Not all of this run is at {self.remote.address}. All of it is in {self.folder}, and the "
            "next training on this machine with the same output_dir uploads it."
        ) from self._error

    def _upload_as_asked(self) -> None:
        while self._is_asked:
            self._is_asked, self._error = False, None
            try:
                self._upload_all()
            except Exception as error:
                self._error = error
                logger.warning("%s It is tried again at the next save, or at the end of training.", error)

    def _upload_all(self) -> None:
        self._refuse_if_taken_over()
        while (name := self._next_to_upload()) is not None:
            # It may be thinned or deleted meanwhile.
            with contextlib.suppress(FileNotFoundError):
                self._upload(name)
        send_files(self.folder)
        # Nothing older is deleted before the newest one is safe.
        local = self.local_checkpoints()
        if local and self.manifests.get(local[0]):
            for name in self.manifests.keys() - local:
                self._refuse_if_taken_over()
                self.manifests[name] = UNFINISHED
                self.remote.write(f"{name}/{MANIFEST_NAME}", UNFINISHED)
                self.remote.delete(name)
                del self.manifests[name]
                self._note()

    def keeps(self, path: str) -> bool:
        """Return whether a checkpoint stays here, since neither it nor a newer one is safe at the address."""
        local = self.local_checkpoints() if Path(path).parent == self.folder else []
        # A newer one that is safe may have been deleted here already.
        names = _highest_first([*local, *self.manifests])
        name = Path(path).name
        return name in local and not any(map(self._is_there, names[: names.index(name) + 1]))

    def _is_there(self, name: str) -> bool:
        content = self.manifests.get(name)
        return bool(content) and _content_of(self.folder / name / MANIFEST_NAME) in (content, None)

    def _next_to_upload(self) -> str | None:
        for name in self.local_checkpoints():
            if (path := str(self.folder / name)) in self.kept and not self.keeps(path):
                continue
            manifest = None if self._is_there(name) else _parsed(_content_of(self.folder / name / MANIFEST_NAME))
            # Of one that is at the address alone the manifest is here.
            if manifest is not None and all((self.folder / name / file).is_file() for file in manifest.files):
                return name
        return None

    def _upload(self, name: str) -> None:
        content = (self.folder / name / MANIFEST_NAME).read_bytes()
        now, before = parsed_manifest(content).files, _parsed(self.manifests.get(name))
        there = {} if before is None else before.files
        if changed := [file for file in now if there.get(file) != now[file]]:
            self.manifests[name] = UNFINISHED
            self.remote.write(f"{name}/{MANIFEST_NAME}", UNFINISHED)
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
        self.manifests[name] = content
        self._note()
        logger.info("Uploaded %s to %s", self.folder / name, self.remote.address)

    def _refuse_if_taken_over(self) -> None:
        marker = _fields_of(self.remote.read(MARKER_NAME))
        if marker.get("run", self._identity["run"]) != self._identity["run"]:
            raise RemoteFolderError(
                f"{self.remote.address}/{MARKER_NAME} says that another run, {marker.get('holder')}, began to upload "
                "there. Two runs there would delete each other's checkpoints, so this one uploads nothing more."
            )

    def _note(self) -> None:
        marker = {**self._identity, "checkpoints": _highest_first(self.manifests)}
        self.remote.write(MARKER_NAME, json.dumps(marker, indent=1).encode())
        sums = {name: zlib.crc32(content) for name, content in self.manifests.items() if content}
        write_whole(self.folder / UPLOADED_NAME, json.dumps(sums, indent=1))


def _content_of(path: Path) -> bytes | None:
    # Another thread may delete it.
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _parsed(content: bytes | None) -> Manifest | None:
    """Return a manifest; None if there is none, it is torn, or it names files outside of the checkpoint."""
    try:
        manifest = parsed_manifest(content or b"")
    except DamagedManifest:
        return None
    return None if any(name.startswith("/") or ".." in name.split("/") for name in manifest.files) else manifest


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
def uploaded_run(folder: Path, hang_timeout: float) -> Iterator[RemoteRun | None]:
    """Upload what is saved in the local folder of a run at an address during the block.

    A block that ends without an error ends with `finish` of what it is given.

    Raises:
        RemoteFolderError: nothing can be written there.
    """
    # A training inside of another one in its folder uploads nothing by itself.
    if folder.resolve() in _uploaded:
        yield None
        return
    run = RemoteRun(folder, hang_timeout)
    logger.info("Checkpoints are written to %s and uploaded to %s", folder, run.remote.address)
    run.claim()
    _uploaded[folder.resolve()] = run
    keepers[run.keeps] = run.kept
    try:
        yield run
    except BaseException as error:
        if not isinstance(error, RemoteFolderError):
            logger.warning("Uploading what is left of %s before the error ends this run.", folder)
            with contextlib.suppress(RemoteFolderError):
                run.finish()
        raise
    finally:
        del keepers[run.keeps]
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


def fetch_newest(folder: Path | str, without: Collection[str] = ()) -> set[str]:
    """Bring the newest checkpoint at an address, and the best one that it names, to the folder that stands for it.

    Those in `without` do not count, and those that this returns: they are here, and were deleted at the address.

    Raises:
        RemoteFolderError: an object could not be read.
    """
    run = RemoteRun(Path(folder))
    run.survey()
    names = {*run.manifests, *run.foreign, *run.local_checkpoints()}.difference(run.gone, without)
    for name in _highest_first(names):
        manifest = _parsed(run.manifests.get(name)) or readable_manifest(run.folder / name)
        if not manifest.is_thinned and manifest.weights_are_finite is not False and run.bring(name):
            state = _fields_of(_content_of(run.folder / name / TRAINER_STATE_NAME))
            if (best := Path(state.get("best_model_checkpoint") or "").name) in run.manifests:
                run.bring(best)
            break
    return run.gone


def fetch_checkpoint(folder: Path) -> None:
    """Bring one checkpoint from an address to the local folder that stands for it, unless it is there.

    Raises:
        RemoteFolderError: an object could not be read.
    """
    if damage_in(folder):
        RemoteRun(folder.parent).bring(folder.name)


def fetch_small_files(folder: Path, names: Collection[str]) -> None:
    """Bring files of a run, and of its newest checkpoint, from an address to the local folder that stands for it.

    Raises:
        RemoteFolderError: an object could not be read.
    """
    run = RemoteRun(folder)
    run.survey()
    complete = [name for name, content in run.manifests.items() if content]
    for place in ["", *(f"{name}/" for name in _highest_first(complete)[:1])]:
        for name in names:
            run.remote.fetch(f"{place}{name}", folder / place / name)
