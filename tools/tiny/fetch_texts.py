"""Fetch the prose that the tiny model is trained on: free texts inside Debian packages, fetched by package name.

``python -m tools.tiny.fetch_texts`` writes ``train.txt`` and ``held_out_SOURCE.txt`` in ``build/tiny/texts``. Needs
``apt-get`` and ``dpkg``; the archive's package lists have to be present (``apt-get update``). Sources and licences:
``tools/tiny/DATA.md``.
"""

from __future__ import annotations

import argparse
import lzma
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("r-cran-janeaustenr", "sword-text-kjv", "python3.11-doc")
DEFAULT_FOLDER = Path("build/tiny/texts")
HELD_OUT_EVERY = 40
"""One in so many pieces of about 4,000 characters is held out."""
_PIECE_CHARACTERS = 4000

_R_STRING = re.compile(rb"\x00[\x00\x04]\x00\x09(?=[\x00-\x7f]{4})")
_MARKUP = re.compile(r"<[^>]*>")


def fetch_packages(folder: Path) -> None:
    """Download and unpack :data:`PACKAGES` below ``folder``."""
    for package in PACKAGES:
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
    for archive in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(archive), str(folder)], check=True)


def austen_novels(root: Path) -> Iterator[str]:
    """Lines of six novels. They lie in R's lazy-load format: a sequence of length-prefixed compressed objects."""
    file = next(root.glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"))
    for content in _lazy_load_objects(file.read_bytes()):
        yield "\n".join(_r_strings(content))


def _lazy_load_objects(data: bytes) -> Iterator[bytes]:
    start = 0
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    while start < len(data):
        for kind in (b"Z", b"x"):  # raw LZMA2 behind a marker, or a zlib stream
            if data[start + 4 : start + 5] != kind:
                continue
            if kind == b"Z":
                unpacker: lzma.LZMADecompressor | object = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)
                content = unpacker.decompress(data[start + 5 :])  # type: ignore[attr-defined]
            else:
                unpacker = zlib.decompressobj()
                content = unpacker.decompress(data[start + 4 :])  # type: ignore[attr-defined]
            start = len(data) - len(unpacker.unused_data)  # type: ignore[attr-defined]
            yield content
            break
        else:
            raise ValueError(f"unknown compression {data[start + 4 : start + 5]!r} at byte {start} of the novels")


def _r_strings(content: bytes) -> Iterator[str]:
    """The strings of a serialised character vector, in order."""
    for match in _R_STRING.finditer(content):
        (length,) = struct.unpack(">i", content[match.end() : match.end() + 4])
        if 0 <= length < 400:
            yield content[match.end() + 4 : match.end() + 4 + length].decode("utf-8", "replace")


def bible_chapters(root: Path) -> Iterator[str]:
    """The King James Bible from a SWORD module: an index of (offset, size, unpacked size) over zlib blocks."""
    for index in sorted(root.glob("usr/share/sword/modules/texts/ztext/*/*.bzs")):
        blocks = index.with_suffix(".bzz").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index.read_bytes()):
            if size:
                text = zlib.decompress(blocks[offset : offset + size]).decode("utf-8", "replace")
                text = re.sub(r"<(note|title)[^>]*>.*?</\1>", " ", text, flags=re.S)
                yield re.sub(r"[ \t\r\n]+", " ", _MARKUP.sub("", text).replace("\x00", " "))


def python_documents(root: Path) -> Iterator[str]:
    """Running text of the Python documentation; code, lists and directives are left out."""
    folder = next(root.glob("usr/share/doc/python3.11/html/_sources"))
    for part in ("tutorial", "howto", "faq", "reference", "extending", "using", "whatsnew", "library"):
        for file in sorted((folder / part).glob("*.rst.txt")):
            paragraphs = re.split(r"\n\s*\n", file.read_text(encoding="utf-8"))
            kept = [_plain(paragraph) for paragraph in paragraphs if _is_prose(paragraph)]
            yield "\n".join(kept)


def _is_prose(paragraph: str) -> bool:
    is_directive = paragraph.startswith((" ", "\t", "..", ">>>", "*", "-", "+", "|", "#", "=", ":"))
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return not is_directive and len(paragraph) > 120 and letters > 0.85 * len(paragraph)


def _plain(paragraph: str) -> str:
    text = re.sub(r":[a-z:+-]+:`~?!?([^`<]*?)(\s*<[^>]*>)?`", r"\1", paragraph)
    text = re.sub(r"``([^`]*)``", r"\1", text)
    text = re.sub(r"[`*]+|_\b(?=\W)", "", text).replace("::", ":")
    return re.sub(r"\s+", " ", text).strip()


def normalise(text: str) -> str:
    """Straight quotes and dashes, and lines of one paragraph joined."""
    table = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "--", 0xA0: " ", 0xB6: ""}
    text = text.translate(table).replace("_", "")
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n".join(re.sub(r"\s+", " ", paragraph).strip() for paragraph in paragraphs if paragraph.strip())


def split_pieces(text: str) -> Iterator[tuple[bool, str]]:
    """``(is held out, piece)``: pieces of about 4,000 characters, cut at sentence ends."""
    start, number = 0, 0
    while start < len(text):
        end = text.find(". ", start + _PIECE_CHARACTERS)
        end = len(text) if end < 0 else end + 2
        yield number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2, text[start:end].strip()
        start, number = end, number + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    train: list[str] = []
    held_out: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        fetch_packages(root)
        sources = {"austen": austen_novels, "bible": bible_chapters, "python": python_documents}
        for source, read in sources.items():
            text = "\n".join(normalise(part) for part in read(root))
            for is_held_out, piece in split_pieces(text):
                (held_out.setdefault(source, []) if is_held_out else train).append(piece)
            print(f"{source}: {len(text):,} characters, {len(held_out[source])} pieces held out")
    (out / "train.txt").write_text("\n\n".join(train), encoding="utf-8")
    for source, pieces in held_out.items():
        (out / f"held_out_{source}.txt").write_text("\n\n".join(pieces), encoding="utf-8")


if __name__ == "__main__":
    main()
