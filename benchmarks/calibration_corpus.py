"""Make the text that the calibration benchmark uses, from freely licensed Debian packages.

    python benchmarks/calibration_corpus.py OUT

downloads the packages of `PACKAGES` with apt-get, unpacks them without installing anything, and
writes two files per domain: OUT/<domain>.calibration.txt and OUT/<domain>.evaluation.txt. A
document lies in one of the two, decided by a hash of its text, so that they are disjoint.
Documents are separated by a form feed. `code` is the standard library of the running Python.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PACKAGES = (
    "bible-kjv",
    "bible-kjv-text",
    "debian-handbook",
    "dict-foldoc",
    "dict-gcide",
    "dict-jargon",
    "fortunes",
    "git-doc",
    "python3.11-doc",
)
SEPARATOR = "\n\f\n"
DOCUMENT_CHARACTERS = 4000
DOMAIN_CHARACTERS = 3_000_000
_SHORTEST = 200
_EVALUATION_SHARE = 8
"""One document in eight is for evaluation."""


def read_text(path: Path) -> str:
    """A text file, gzip or dictzip or plain."""
    opener = gzip.open if path.suffix in (".gz", ".dz") else open
    with opener(path, "rb") as file:
        return file.read().decode("utf-8", "replace")


def plain(page: str) -> str:
    """The text of an HTML page without markup, scripts and navigation."""
    body = re.search(r'<div class="body" role="main">(.*?)<div class="clearer"', page, re.DOTALL)
    page = body[1] if body else page
    page = re.sub(r"<(script|style|head)\b.*?</\1>", " ", page, flags=re.DOTALL)
    page = re.sub(r"</(?:p|div|h[1-6]|li|tr|pre|dt|dd)>", "\n", page)
    page = html.unescape(re.sub(r"<[^>]+>", "", page)).replace("¶", "")
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+\n", "\n", page)).strip()


def documents(text: str) -> Iterator[str]:
    """Pieces of about `DOCUMENT_CHARACTERS`, cut between paragraphs."""
    piece: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        size += len(paragraph)
        if size >= DOCUMENT_CHARACTERS:
            yield "\n\n".join(piece)
            piece, size = [], 0
    if piece:
        yield "\n\n".join(piece)


def _files(folder: Path, pattern: str, without: str = "$^") -> list[Path]:
    found = (path for path in sorted(folder.glob(pattern)) if path.is_file())
    return [path for path in found if not re.search(without, path.as_posix())]


def _all(paths: Iterable[Path], convert: Callable[[str], str] = str) -> Iterator[str]:
    for path in paths:
        yield from documents(convert(read_text(path)))


def _bible(unpacked: Path) -> Iterator[str]:
    done = subprocess.run(
        [unpacked / "bible-kjv/usr/bin/bible", "-f", "gen1:1-rev22:21"],
        cwd=unpacked / "bible-kjv-text/usr/lib",
        capture_output=True,
        text=True,
        check=True,
    )
    verses = done.stdout.split("\n")
    for start in range(0, len(verses), 40):
        yield "\n".join(verses[start : start + 40])


def domains(unpacked: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """(domain, its documents) for every source."""
    share = "usr/share"
    yield "kjv", _bible(unpacked)
    handbook = unpacked / "debian-handbook" / share / "doc/debian-handbook/html"
    for language in ("en-US", "de-DE", "fr-FR", "es-ES"):
        pages = _files(handbook / language, "*.html")
        yield f"handbook_{language[:2]}", _all(pages, plain)
    for name in ("gcide", "foldoc", "jargon"):
        yield name, _all([unpacked / f"dict-{name}" / share / f"dictd/{name}.dict.dz"])
    manual = unpacked / "python3.11-doc" / share / "doc/python3.11/html"
    yield "pydocs", _all(_files(manual, "**/*.html", "genindex|changelog"), plain)
    yield "gitdocs", _all(_files(unpacked / "git-doc" / share / "doc/git-doc", "*.html"), plain)
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = "site-packages|/test|/encodings/|/idlelib/"
    code = [*_files(library, "*.py", skipped), *_files(library, "*/*.py", skipped)]
    yield "code", _all(code)
    cookies = _files(unpacked / "fortunes" / share / "games/fortunes", "*", r"\.")
    yield "fortunes", _all(cookies, lambda text: text.replace("\n%\n", "\n\n"))


def write_domain(folder: Path, name: str, found: Iterable[str]) -> dict[str, int]:
    """Split documents in an order that depends on their text alone; returns characters by part."""
    ranked = sorted(
        (hashlib.sha256(text.encode()).digest(), text) for text in found if len(text) > _SHORTEST
    )
    parts: dict[str, list[str]] = {"calibration": [], "evaluation": []}
    size = 0
    for digest, text in ranked:
        part = "calibration" if digest[-1] % _EVALUATION_SHARE else "evaluation"
        parts[part].append(text)
        size += len(text)
        if size > DOMAIN_CHARACTERS:
            break
    for part, texts in parts.items():
        (folder / f"{name}.{part}.txt").write_text(SEPARATOR.join(texts), encoding="utf-8")
    return {part: sum(map(len, texts)) for part, texts in parts.items()}


def unpack(packages: Iterable[str], folder: Path) -> Path:
    """Fetch packages into `folder` and unpack each into a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        target = folder / package
        if not target.exists():
            subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
            (archive,) = folder.glob(f"{package}_*.deb")
            subprocess.run(["dpkg-deb", "-x", archive, target], check=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--unpacked", type=Path, help="where the packages are or go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.unpacked or options.out / "packages"
    unpacked = unpack(PACKAGES, folder.resolve())
    for name, found in domains(unpacked):
        print(name, write_domain(options.out, name, found))


if __name__ == "__main__":
    main()
