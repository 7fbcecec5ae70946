"""The size of a PNG, JPEG or WebP image, read from its headers; whether it is complete. Pure.

It decodes no pixel. A PNG's chunks are checked by their sums; of a JPEG that its end is there, of a
WebP that it is as long as it says.
"""

from __future__ import annotations

import struct
import zlib

_PNG = b"\x89PNG\r\n\x1a\n"
# Markers of a frame: SOF0 to SOF15 without DHT, JPG and DAC (ITU-T T.81, table B.1).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def image_size(data: bytes) -> tuple[str, int, int]:
    """Return the format, width and height in pixels of a complete image.

    Raises ValueError if it is none of the three formats, is cut off, or is damaged.
    """
    try:
        if data.startswith(_PNG):
            return "png", *_png(data)
        if data.startswith(b"\xff\xd8"):
            return "jpeg", *_jpeg(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return "webp", *_webp(data)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the image is cut off after {len(data)} bytes") from error
    raise ValueError(f"{len(data)} bytes that are no PNG, JPEG or WebP image")


def _png(data: bytes) -> tuple[int, int]:
    """Walk all chunks (W3C PNG, third edition, section 5)."""
    at, kind = len(_PNG), b""
    while kind != b"IEND":
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 4 : at + 8 + length]
        (crc,) = struct.unpack_from(">I", data, at + 8 + length)
        if zlib.crc32(body) != crc:
            raise ValueError(f"the PNG's chunk {kind!r} at byte {at} is damaged")
        at += 12 + length
    if data[12:16] != b"IHDR":
        raise ValueError("the PNG does not begin with its header")
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _jpeg(data: bytes) -> tuple[int, int]:
    """Walk the segments up to the frame (ITU-T T.81, annex B)."""
    if not data.rstrip(b"\x00").endswith(b"\xff\xd9"):
        raise ValueError(f"the JPEG has no end: it is cut off after {len(data)} bytes")
    at = 2
    while True:
        while data[at + 1] == 0xFF:  # fill bytes
            at += 1
        marker, (length,) = data[at + 1], struct.unpack_from(">H", data, at + 2)
        if data[at] != 0xFF or marker == 0xDA:
            raise ValueError("the JPEG has no frame that says its size")
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        at += 2 + length


def _webp(data: bytes) -> tuple[int, int]:
    """Read the first chunk: VP8X, VP8L or VP8 (RFC 9649, sections 2.4 to 2.7)."""
    (length,) = struct.unpack_from("<I", data, 4)
    if len(data) < 8 + length:
        raise ValueError(f"the WebP is cut off: {len(data)} of {8 + length} bytes")
    if data[12:16] == b"VP8X":
        width, height = (int.from_bytes(data[i : i + 3], "little") + 1 for i in (24, 27))
        return width, height
    if data[12:16] == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if data[12:16] == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError("the WebP has no frame that says its size")
