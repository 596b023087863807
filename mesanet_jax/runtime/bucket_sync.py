"""Files that grow, of a run whose workdir is in a bucket, where nothing can be appended to."""

import pathlib
import shutil
import sys
import tempfile
import threading

from etils import epath
from tqdm import tqdm

from mesanet_jax.runtime import workdir as workdir_lib

RESUMED = ("metrics.jsonl", "goodput.json", "wandb_id")  # what a resumed run reads and goes on with
_EVERY = 60.0  # seconds between copies, for whoever watches the run


class Spool:
    """The local directory `local` for what a run writes bit by bit: metrics, TensorBoard events, profiles.

    Of a local workdir it is the workdir. Of a bucket it is a temporary directory, whose changed files are copied to the
    bucket by a thread: every minute, at each `flush` (with every checkpoint, so that a run which is killed lacks no
    metrics but of the steps that it will repeat), and at the end. A copy that fails is said once and tried again: the
    run goes on.
    """

    def __init__(self, workdir: epath.Path):
        self._workdir, self._remote = workdir, not workdir_lib.is_local(workdir)
        self.local = pathlib.Path(tempfile.mkdtemp(prefix="mesanet-jax-") if self._remote else workdir)
        self._copied: dict[pathlib.Path, tuple[int, int]] = {}  # file -> what it was like when it was copied
        self._wake, self._ended, self._failed = threading.Event(), False, False

    def __enter__(self):
        if self._remote:
            self._fetch()
            self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_):
        if not self._remote:
            return
        self._ended = True
        self.flush()
        self._thread.join()
        if self._failed:
            print(f"the newest metrics are not in {self._workdir} but in {self.local}", file=sys.stderr)
        else:
            shutil.rmtree(self.local, ignore_errors=True)

    def flush(self) -> None:
        """Has what is written so far copied, without waiting for it."""
        self._wake.set()

    def _fetch(self) -> None:
        for name in RESUMED:
            if (self._workdir / name).exists():
                file = self.local / name
                file.write_bytes((self._workdir / name).read_bytes())
                self._copied[file] = _mark(file)

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait(_EVERY)
            self._wake.clear()
            self._copy()

    def _copy(self) -> None:
        try:
            files = [path for path in self.local.rglob("*") if path.is_file() and path.suffix != ".partial"]
            for file in files:
                mark = _mark(file)  # before it is read: what is appended meanwhile is copied the next time
                if self._copied.get(file) != mark:
                    target = self._workdir / file.relative_to(self.local)
                    target.write_bytes(file.read_bytes())
                    self._copied[file] = mark
            self._failed = False
        except Exception as error:  # each of the network's libraries raises its own kinds
            if not self._failed:
                said = f"warning: {self._workdir}: metrics cannot be copied there, the run goes on: {error}"
                tqdm.write(" ".join(said.split()), file=sys.stderr)
            self._failed = True


def _mark(file: pathlib.Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_size, about.st_mtime_ns
