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
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from littrainer.checkpoint.atomic_write import RANK_SUFFIX, STAGING_DIR, delete_folder, remove_if_empty
from littrainer.checkpoint.checksums import MANIFEST_NAME, DamagedManifest, Manifest, file_record, parse_manifest
from littrainer.checkpoint.layout import TRAINER_STATE_NAME, checkpoint_step, list_checkpoints, make_output_dir
from littrainer.checkpoint.verification import damage_in, edits_in, readable_manifest
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.remote_folder import MAX_TRIES, RemoteFolder, RemoteFolderError, get_remote_url, is_inside

logger = logging.getLogger(__name__)

# At the address: the run that uploads there, and the checkpoints that are complete, which a listing may miss.
MARKER_NAME = ".littrainer_running.json"
# Written and deleted there, so that nothing is taken apart that cannot be deleted.
PROBE_NAME = ".littrainer_probe"
# In the local folder, which may be a copy, by the address: the sums of the manifests that were last there.
UPLOADED_MANIFESTS_NAME = ".littrainer_uploaded.json"
# In the local folder, by the address: size and modification time of each file outside of checkpoints that is there.
UPLOADED_FILES_NAME = ".littrainer_sent.json"
MESSAGE_INTERVAL_S = 30.0
# In the manifest of a checkpoint at the address that is being uploaded or deleted.
INCOMPLETE = b""


def _highest_first(paths: Iterable[object]) -> list[str]:
    """Return the names of those that are checkpoints, once each, the highest step first."""
    steps = {Path(str(path)).name: checkpoint_step(str(path)) for path in paths}
    return sorted((name for name, step in steps.items() if step is not None), key=lambda name: -(steps[name] or 0))


class RemoteRun:
    """A run at an address, and the local folder that stands for it.

    Attributes:
        hang_timeout: seconds without an uploaded object after which `finish` fails; 0 if none.
        manifests: what they hold at the address, by the checkpoints' names; INCOMPLETE if one is not complete.
        foreign: names of checkpoints at the address without a manifest, such as those of transformers.
        gone: names of local ones that were uploaded from here and are no longer at the address.
        earlier: local manifests of those that are not of this training, and so are not deleted at the address.
        deferred: paths of local ones that are to be deleted when they no longer have to stay.
        rotated: names of those that this training deletes here, and so at the address.
    """

    def __init__(self, folder: Path, hang_timeout: float = 0) -> None:
        make_output_dir(str(folder))
        self.folder, self.remote = folder, RemoteFolder(str(get_remote_url(folder)))
        self.manifests: dict[str, bytes] = {}
        self.foreign, self.gone, self.deferred, self.rotated, self._warned = (set[str]() for _ in range(5))
        # Checkpoint -> files of an upload that has not ended with a manifest: the checkpoint was thinned meanwhile.
        self._begun: dict[str, set[str]] = {}
        self.earlier: dict[str, bytes | None] = {}
        self._known = _parse_json_object(_read_bytes(folder / UPLOADED_MANIFESTS_NAME), self.remote.address)
        self._identity = {"run": uuid.uuid4().hex, "holder": f"process {os.getpid()} on {socket.gethostname()}"}
        self.hang_timeout, self._is_asked = hang_timeout, False
        self._work: threading.Thread | None = None
        self._error: BaseException | None = None

    def local_checkpoints(self) -> list[str]:
        """Return the names of the checkpoints in the local folder, the highest step first."""
        return [path.name for path in list_checkpoints(self.folder)]

    def scan(self) -> None:
        """Find out what is at the address."""
        listed = _highest_first(self.remote.listed())
        noted = _parse_json_object(self.remote.read(MARKER_NAME)).get("checkpoints")
        for name in _highest_first([*listed, *(noted if isinstance(noted, list) else ()), *self.local_checkpoints()]):
            # A checkpoint that is not there has grave effects.
            content = self.remote.read(f"{name}/{MANIFEST_NAME}") or self.remote.read(f"{name}/{MANIFEST_NAME}")
            if content == INCOMPLETE or _parse_or_none(content) is not None:
                self.manifests[name] = content or INCOMPLETE
            elif content is not None:
                logger.warning("%s/%s does not count: its %s is torn.", self.remote.address, name, MANIFEST_NAME)
            elif name in listed:
                self.foreign.add(name)
            elif self._was_uploaded(name, self.read_local_manifest(name)):
                self.gone.add(name)

    def read_local_manifest(self, name: str) -> bytes | None:
        return _read_bytes(self.folder / name / MANIFEST_NAME)

    def stays(self, name: str, content: bytes) -> bool:
        """Return whether the local one is what is at the address, or was written when that was there already."""
        own = self.read_local_manifest(name)
        return own == content or (own is not None and self._was_uploaded(name, content))

    def _was_uploaded(self, name: str, manifest: bytes | None) -> bool:
        """Return whether a checkpoint with this manifest was uploaded from here, or downloaded to here."""
        return manifest is not None and self._known.get(name) == zlib.crc32(manifest)

    def _move_local_aside(self, name: str) -> None:
        """Delete a local checkpoint if it was uploaded and there is another one, else set it aside."""
        own, local = self.read_local_manifest(name), self.folder / name
        if not local.is_dir():
            return
        was_uploaded = self._was_uploaded(name, own)
        aside = f".deleted-{name}" if was_uploaded else f".never-uploaded-{name}-{zlib.crc32(own or b''):08x}"
        delete_folder(self.folder / aside)
        local.rename(self.folder / aside)
        if not was_uploaded:
            logger.warning("%s is now %s: %s has another one of that name.", local, aside, self.remote.address)
        elif any(self.manifests.values()):
            delete_folder(self.folder / aside)

    def download(self, name: str) -> bool:
        """Download a checkpoint unless it is here; return whether it is here, and intact; damage there is an error."""
        local, content = self.folder / name, self.remote.read(f"{name}/{MANIFEST_NAME}")
        manifest = _parse_or_none(content)
        if (content is None or manifest is None or self.stays(name, content)) and not damage_in(local):
            return True
        # Another run is uploading or deleting it.
        if manifest is None and content is not None:
            return False
        part = self.folder / STAGING_DIR / f"{name}{RANK_SUFFIX}{os.getpid()}"
        logger.info("Downloading %s/%s to %s", self.remote.address, name, local)
        try:
            # A process of the same number may have been killed before.
            delete_folder(part)
            if content is not None and manifest is not None:
                self._download(name, content, manifest, part)
            elif not self._download_without_manifest(name, part):
                return False
            # Another process of this machine may download it at the same time.
            with contextlib.suppress(OSError):
                self._move_local_aside(name)
                part.rename(local)
            if not local.is_dir() or self.read_local_manifest(name) != content:
                raise RemoteFolderError(f"{self.remote.address}/{name} was downloaded, and {local} cannot be replaced.")
            self._record_uploads(name)
            return True
        finally:
            shutil.rmtree(part, ignore_errors=True)
            remove_if_empty(part.parent)

    def _download(self, name: str, content: bytes, manifest: Manifest, part: Path) -> None:
        self.manifests[name] = content
        part.mkdir(parents=True)
        (part / MANIFEST_NAME).write_bytes(content)
        for _ in range(MAX_TRIES):
            for file, record in manifest.files.items():
                if not (part / file).is_file() or file_record(part / file) != record:
                    self.remote.download(f"{name}/{file}", part / file)
            if not (damage := damage_in(part)) and not edits_in(part):
                return
        if damage:
            raise RemoteFolderError(
                f"{self.remote.address}/{name} was downloaded {MAX_TRIES} times and is damaged: {' '.join(damage)} Try "
                "it later, delete it there, or give the address of another checkpoint."
            )

    def _download_without_manifest(self, name: str, part: Path) -> bool:
        """Return whether it is a checkpoint, and intact."""
        damage = [f"{file} would be outside of it." for file in self.remote.download_all(name, part)]
        # Our own files without the manifest are a part of a checkpoint.
        if not part.is_dir() or any(part.glob("littrainer_*")):
            return False
        if damage := damage or damage_in(part):
            logger.warning("Passing over %s/%s, which is damaged: %s", self.remote.address, name, " ".join(damage))
        return not damage

    def claim(self) -> None:
        """Begin to be the run that uploads there; whether another one is alive cannot be known without locks.

        A checkpoint that is only there gets a local folder with its manifest, so that it counts when older ones are
        rotated. One that was uploaded from here and is no longer there is deleted, or set aside if there is no other.
        """
        if (marker := self.remote.read(MARKER_NAME)) is None:
            # The files that were sent are there no longer.
            (self.folder / UPLOADED_FILES_NAME).unlink(missing_ok=True)
        if holder := _parse_json_object(marker).get("holder"):
            logger.warning("%s is taken over from %s, which has not said that it ended.", self.remote.address, holder)
        self.scan()
        for name in self.gone:
            logger.warning("%s/%s was deleted there, so it goes from %s too.", self.remote.address, name, self.folder)
            self._move_local_aside(name)
        if self.foreign:
            effect = "They are never deleted, and a new checkpoint of the same name replaces their files"
            logger.warning("%s: no manifest in %s. %s.", self.remote.address, ", ".join(sorted(self.foreign)), effect)
        for name, content in self.manifests.items():
            if content and not self.stays(name, content):
                self._move_local_aside(name)
                (self.folder / name).mkdir()
                write_atomically(self.folder / name / MANIFEST_NAME, content)
        self._write_marker()
        self._refuse_second_run()

    def end(self) -> None:
        """Stop being the run that uploads there."""
        # An upload that hangs would hang here too, and the error of the training is the one to raise.
        if self._work is None or not self._work.is_alive():
            with contextlib.suppress(RemoteFolderError, OSError):
                self._refuse_second_run()
                self._identity["holder"] = ""
                self._write_marker()

    def begin(self) -> threading.Thread:
        """Begin to upload what has changed, or do it after what is on its way."""
        self._is_asked = True
        if self.earlier and self._work is None:
            text = "%s has %s of an earlier run, which stay unless saved again. A resume takes the highest step."
            logger.warning(text, self.remote.address, ", ".join(self.earlier))
        if self._work is None or not self._work.is_alive():
            # An upload may hang, and a process that ends does not wait for a daemon.
            self._work = threading.Thread(target=self._upload_until_done, name="littrainer uploads", daemon=True)
            self._work.start()
        return self._work

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def finish(self) -> None:
        """Wait for running uploads, and upload what is left; an upload that fails twice, or hangs, is an error."""
        seconds = self.hang_timeout or MESSAGE_INTERVAL_S
        for _ in range(2):
            work, written = self.begin(), -1
            while work.is_alive() and not (self.hang_timeout and written == RemoteFolder.written):
                written = RemoteFolder.written
                work.join(seconds)
                if work.is_alive():
                    logger.warning("Waiting for the upload of %s to %s.", self.folder, self.remote.address)
            if work.is_alive():
                self._error = TimeoutError(f"No object was uploaded for {seconds:g} s (hang_timeout).")
            # The thread may have ended just when more was requested.
            elif self._error is None and not self._is_asked:
                return
        raise RemoteFolderError(
            f"{self._error} Not all of this run is at {self.remote.address}. All of it is in {self.folder}, and the "
            "next training on this machine with the same output_dir uploads it."
        ) from self._error

    def _upload_until_done(self) -> None:
        while self._is_asked:
            self._is_asked, self._error = False, None
            try:
                self._upload_all()
            # A thread that ends for whatever reason has not uploaded all.
            except BaseException as error:
                self._error = error
                logger.warning("%s It is tried again at the next save, or at the end of training.", error)

    def _upload_all(self) -> None:
        self._refuse_second_run()
        while (name := self._next_to_upload()) is not None:
            # The checkpoint may be thinned or deleted meanwhile.
            with contextlib.suppress(FileNotFoundError):
                self._upload(name)
        upload_files(self.folder, self._write)
        # Nothing older is deleted before the newest one is safe.
        local = self.local_checkpoints()
        older = {name for name, content in self.manifests.items() if not content or name in self.rotated}
        older = older.difference(self.earlier, local)
        if not older or not local or not self.manifests.get(local[0]):
            return
        effect = "So older checkpoints stay there."
        try:
            self.remote.write(PROBE_NAME, b"")
            self.remote.delete(PROBE_NAME, is_folder=True)
            effect = "It is tried again at the next save, or by the next training there."
            for name in older:
                self.manifests[name] = INCOMPLETE
                self._write(f"{name}/{MANIFEST_NAME}", INCOMPLETE)
                self.remote.delete(name, is_folder=True)
                del self.manifests[name]
                self._write_marker()
        except RemoteFolderError as error:
            self._warn_once(f"{error} {effect}")

    def should_defer_deletion(self, path: str) -> bool:
        """Return whether a checkpoint that is to be deleted has to stay for now, and note it if so."""
        must_stay = self.must_keep(path)
        (self.deferred.add if must_stay else self.deferred.discard)(path)
        return must_stay

    def on_resume(self, name: str) -> None:
        """Let earlier checkpoints at the URL be deleted, if a training resumes from this one, which is among them."""
        if self.earlier.get(name) == self.read_local_manifest(name):
            self.earlier.clear()

    def must_keep(self, path: str) -> bool:
        """Return whether a checkpoint stays here, since neither it nor a newer one is safe at the address."""
        name, local = Path(path).name, self.local_checkpoints() if Path(path).parent == self.folder else []
        # A newer checkpoint that is safe may have been deleted here already.
        names = _highest_first([*local, *(self.manifests.keys() - self.earlier.keys())])
        stays = name in local and not any(map(self._is_uploaded, names[: names.index(name) + 1]))
        self.rotated |= set() if stays else {name}.intersection(local)
        return stays

    def _is_uploaded(self, name: str) -> bool:
        content = self.manifests.get(name)
        return bool(content) and self.read_local_manifest(name) in (content, None)

    def _next_to_upload(self) -> str | None:
        for name in self.local_checkpoints():
            if (path := str(self.folder / name)) in self.deferred and not self.must_keep(path):
                continue
            if self._is_uploaded(name) or not (own := self.read_local_manifest(name)):
                continue
            manifest, damage = _parse_or_none(own), " ".join(damage_in(self.folder / name))
            if manifest and not damage and all((self.folder / name / file).is_file() for file in manifest.files):
                return name
            # A checkpoint that was thinned or deleted meanwhile is as it has to be.
            if self.read_local_manifest(name) == own:
                self._warn_once(f"{self.folder / name} is damaged, and not uploaded to {self.remote.address}. {damage}")
        return None

    def _upload(self, name: str) -> None:
        content = (self.folder / name / MANIFEST_NAME).read_bytes()
        now, before = parse_manifest(content).files, _parse_or_none(self.manifests.get(name))
        there = {} if before is None else before.files
        self.earlier = {other: own for other, own in self.earlier.items() if other != name or own == content}
        if changed := [file for file in now if there.get(file) != now[file]]:
            self.manifests[name] = INCOMPLETE
            self._write(f"{name}/{MANIFEST_NAME}", INCOMPLETE)
            self._begun.setdefault(name, set()).update(there, changed)
        try:
            for file in changed:
                self._write(f"{name}/{file}", self.folder / name / file)
        except RemoteFolderError:
            if self.read_local_manifest(name) == content:
                raise
        if self.read_local_manifest(name) != content or damage_in(self.folder / name):
            return
        self._write(f"{name}/{MANIFEST_NAME}", content)
        for file in (self._begun.pop(name, set()) | there.keys()) - now.keys():
            self.remote.delete(f"{name}/{file}")
        self.manifests[name] = content
        self.rotated.discard(name)
        self._write_marker()
        logger.info("Uploaded %s to %s", self.folder / name, self.remote.address)

    def _write(self, name: str, content: bytes | Path) -> None:
        """Write an object, unless another run has begun meanwhile, as after a machine stood still."""
        self._refuse_second_run()
        self.remote.write(name, content)

    def _refuse_second_run(self) -> None:
        marker = _parse_json_object(self.remote.read(MARKER_NAME))
        if marker.get("run", self._identity["run"]) != self._identity["run"]:
            raise RemoteFolderError(
                f"{self.remote.address}/{MARKER_NAME} says that another run, {marker.get('holder')}, began to upload "
                "there. Two runs there would delete each other's checkpoints, so this one uploads nothing more."
            )

    def _write_marker(self) -> None:
        marker = {**self._identity, "checkpoints": _highest_first(self.manifests)}
        self.remote.write(MARKER_NAME, json.dumps(marker, indent=1).encode())
        self._record_uploads()

    def _record_uploads(self, *names: str) -> None:
        """Note that what is at the address under these names, or all, is here or was replaced by what is here."""
        found = {name: self.manifests.get(name) for name in names or self.manifests}
        self._known |= {name: zlib.crc32(content) for name, content in found.items() if content}
        write_atomically(
            self.folder / UPLOADED_MANIFESTS_NAME, json.dumps({self.remote.address: self._known}, indent=1)
        )


def _read_bytes(path: Path) -> bytes | None:
    # Another thread may delete it, and a disk may fail.
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None


def _parse_or_none(content: bytes | None) -> Manifest | None:
    """Return a manifest; None if there is none, it is torn, or it names files outside of the checkpoint."""
    try:
        manifest = parse_manifest(content or b"")
    except DamagedManifest:
        return None
    return manifest if all(map(is_inside, manifest.files)) else None


def _parse_json_object(content: bytes | None, address: str | None = None) -> dict[str, Any]:
    """Return what is in a JSON object, or of one by addresses under this; nothing if it is torn or does not exist."""
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
        fields = json.loads(content or b"{}")
        fields = fields if address is None else fields[address]
        return fields if isinstance(fields, dict) else {}
    return {}


# ---- Functions for scripts, resumes and reports ----------------------------------------------------------------------


def upload_files(folder: Path | str, write: Callable[[str, Path], None] | None = None) -> None:
    """Upload what has changed in a folder, except for checkpoints and other runs, if the folder mirrors a URL."""
    if (address := get_remote_url(folder)) is None:
        return
    write, sent = (
        write or RemoteFolder(address).write,
        _parse_json_object(_read_bytes(Path(folder, UPLOADED_FILES_NAME)), address),
    )
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and checkpoint_step(name) is None]
        # A folder that was uploaded by itself may be newer at the address.
        if Path(parent) != Path(folder) and not {UPLOADED_MANIFESTS_NAME, UPLOADED_FILES_NAME}.isdisjoint(names):
            folders[:], names[:] = [], []
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            # A callback may delete a file meanwhile.
            with contextlib.suppress(FileNotFoundError):
                name, stamp = path.relative_to(folder).as_posix(), [path.stat().st_size, path.stat().st_mtime_ns]
                if sent.get(name) != stamp:
                    write(name, path)
                    sent[name] = stamp
                    write_atomically(Path(folder, UPLOADED_FILES_NAME), json.dumps({address: sent}))


def download_newest(folder: Path | str, without: Collection[str] = ()) -> set[str]:
    """Download the newest checkpoint at a URL, and the best one that it names, to the folder that mirrors the URL.

    Checkpoints in `without` do not count, nor do those that this returns: they were deleted at the URL.
    """
    run = RemoteRun(Path(folder))
    run.scan()
    names = {*run.manifests, *run.foreign, *run.local_checkpoints()}.difference(run.gone, without)
    for name in _highest_first(names):
        content = run.manifests.get(name) or INCOMPLETE
        manifest = (None if run.stays(name, content) else _parse_or_none(content)) or readable_manifest(
            run.folder / name
        )
        if not manifest.is_thinned and manifest.weights_are_finite is not False and run.download(name):
            state = _parse_json_object(_read_bytes(run.folder / name / TRAINER_STATE_NAME))
            if (best := Path(str(state.get("best_model_checkpoint") or "")).name) in run.manifests:
                run.download(best)
            break
    return run.gone


def download_checkpoint(folder: Path) -> None:
    """Download one checkpoint to the local folder that mirrors its URL, unless it is there."""
    RemoteRun(folder.parent).download(folder.name)


def download_small_files(folder: Path, names: Collection[str]) -> Path:
    """Download files of a run, and of its newest checkpoint, to a separate folder, and return the folder."""
    run = RemoteRun(folder)
    run.scan()
    complete = [name for name, content in run.manifests.items() if content]
    shutil.rmtree(target := folder / ".report" / folder.name, ignore_errors=True)
    for place in ["", *(f"{name}/" for name in _highest_first(complete)[:1])]:
        for name in names:
            run.remote.download(f"{place}{name}", target / place / name)
    return target
