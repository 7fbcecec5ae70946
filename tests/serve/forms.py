"""Forms that try to make an upload dear, by what they have much of; and what is dear to unpack."""

from __future__ import annotations

FORM = "multipart/form-data; boundary=x"
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
END = b"\r\n--x\r\n" + PURPOSE + b"\r\n--x--\r\n"
EMPTY_FIELD = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'
GOES_ON = "a line begins with the boundary and goes on"
MANY = "more than one file and 8 fields"
NAMED = b'\r\n--x\r\nContent-Disposition: form-data; name="'
PLAIN = "a file"
FORMS = {  # what stands in the file, how that begins and ends, and why the form is refused
    PLAIN: (b"", b"a", b"", ""),
    "starts of a boundary": (b"", b"\r\n-", b"", ""),
    "boundary, other letter": (b"", b"\r\n--xy", b"", GOES_ON),
    "boundary, half an end": (b"", b"\r\n--x-y", b"", GOES_ON),
    "boundary, half a line's end": (b"", b"\r\n--x\r-", b"", GOES_ON),
    "boundary, spaces": (b"\r\n--x", b" ", b"", GOES_ON),
    "parts": (b"\r\n", EMPTY_FIELD, b"", MANY),
    "ends": (b"", b"\r\n--x--", b"", MANY),
    "headers": (b"\r\n--x\r\n", b"a: b\r\n", b"\r\n", "Invalid multipart"),
    "a long header": (b"\r\n--x\r\na: ", b"b", b"\r\n\r\n", "Invalid multipart"),
    "a long name": (NAMED, b"n", b'"\r\n\r\n', "Invalid multipart"),
    "a long field": (NAMED + b'n"\r\n\r\n', b"n", b"", "maximum size"),
}

_EMPTY_BLOCKS = bytes.fromhex(  # of deflate: eight, each with tables of its own, and with nothing
    "04c0810800000000207feb43001c880000000000f2b73e04c0810800000000207feb43001c880000000000f2"
    "b73e04c0810800000000207feb43001c880000000000f2b73e04c0810800000000207feb43001c8800000000"
    "00f2b73e"
)


def pressed_nothing(num_bytes: int) -> bytes:
    """Return a body that looks compressed, about so long, in which there is nothing."""
    return b"\x78\x9c" + _EMPTY_BLOCKS * (num_bytes // len(_EMPTY_BLOCKS))


def form(name: str, num_bytes: int) -> bytes:
    """Return one of the forms, about so long."""
    begin, inside, end, _ = FORMS[name]
    return FILE + begin + inside * (num_bytes // len(inside)) + end + END
