"""Copies the growing files of a run to a bucket, because nothing can be appended to an object in a bucket."""

import pathlib
import shutil
import sys
import tempfile
import threading
from typing import Self

from etils import epath
from tqdm import tqdm

from mesanet_jax.runtime import workdir as workdir_lib

RESUMED = ("metrics.jsonl", "goodput.json", "wandb_id")  # the files that a resumed run reads and continues
_EVERY = 60.0  # seconds between copies, for people who watch the run


class BucketSync:
    """Provides the local directory `local` for files that grow: metrics, TensorBoard events, profiles.

    If the workdir is local, `local` is the workdir itself. If the workdir is in a bucket, `local` is a temporary
    directory, and a thread copies its changed files to the bucket: every minute, at each `flush` and at the end. Call
    `flush` with every checkpoint, so that a run that is killed has lost only metrics of steps that it will repeat. A
    copy that fails is reported once and retried; the run continues.
    """

    def __init__(self, workdir: epath.Path):
        self._workdir, self._remote = workdir, not workdir_lib.is_local(workdir)
        self.local = pathlib.Path(tempfile.mkdtemp(prefix="mesanet-jax-") if self._remote else workdir)
        self._copied: dict[pathlib.Path, tuple[int, int]] = {}  # file -> its version when it was copied
        self._wake, self._ended, self._failed = threading.Event(), False, False

    def __enter__(self) -> Self:
        if self._remote:
            self._fetch()
            self._thread = threading.Thread(target=self._run, name="bucket sync", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if not self._remote:
            return
        self._ended = True
        self.flush()
        self._thread.join()
        if self._failed:
            print(f"the newest metrics are not in {self._workdir}; they are in {self.local}", file=sys.stderr)
        else:
            shutil.rmtree(self.local, ignore_errors=True)

    def flush(self) -> None:
        """Requests a copy of what is written so far, and does not wait for it."""
        self._wake.set()

    def _fetch(self) -> None:
        for name in RESUMED:
            if (self._workdir / name).exists():
                file = self.local / name
                file.write_bytes((self._workdir / name).read_bytes())
                self._copied[file] = _version(file)

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait(_EVERY)
            self._wake.clear()
            self._copy()

    def _copy(self) -> None:
        try:
            files = [path for path in self.local.rglob("*") if path.is_file() and path.suffix != ".partial"]
            for file in files:
                version = _version(file)  # before it is read, so that what is appended meanwhile is copied next time
                if self._copied.get(file) != version:
                    target = self._workdir / file.relative_to(self.local)
                    target.write_bytes(file.read_bytes())
                    self._copied[file] = version
            self._failed = False
        except Exception as error:  # each library for the network raises its own exception types
            if not self._failed:
                warning = f"warning: {self._workdir}: cannot copy metrics to it, the run continues: {error}"
                tqdm.write(" ".join(warning.split()), file=sys.stderr)
            self._failed = True


def _version(file: pathlib.Path) -> tuple[int, int]:
    """The size and modification time of a file; at least one of them differs once the file has changed."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns
