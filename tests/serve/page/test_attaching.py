"""Files that go with a question, in a real browser: texts and PDFs, chosen, dropped or pasted."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from tests.serve.page.browser import (
    DESK,
    PHONE,
    ask,
    find,
    keep,
    record,
    says,
    sees,
    sent,
    set_size,
    texts,
)
from tests.serve.page.test_store import press

CHIPS = "#attached li"
BRING = """
const [kind, target, name, text] = arguments;
const data = new DataTransfer();
data.items.add(new File([text], name, { type: 'text/plain' }));
const how = { clipboardData: data, dataTransfer: data, bubbles: true, cancelable: true };
const made = kind === 'paste' ? new ClipboardEvent(kind, how) : new DragEvent(kind, how);
document.querySelector(target).dispatchEvent(made);
"""


def write_pdf(path: Path, *pages: str) -> Path:
    """Write a PDF with a line of text on each page; none where the line is empty."""
    contents = [zlib.compress(f"BT /F1 12 Tf 50 700 Td ({line}) Tj ET".encode()) for line in pages]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, content in enumerate(contents):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        head = f"<< /Length {len(content)} /Filter /FlateDecode >>\nstream\n".encode()
        objects.append(head + content + b"\nendstream")
    data, places = b"%PDF-1.4\n", []
    for i, body in enumerate(objects, 1):
        places.append(len(data))
        data += f"{i} 0 obj\n".encode() + body + b"\nendobj\n"
    rows = "".join(f"{place:010} 00000 n \n" for place in places)
    head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{rows}"
    tail = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    path.write_bytes(data + (head + tail).encode())
    return path


def attach(page: Chrome, path: Path) -> None:
    find(page, "#attach-file").send_keys(str(path))


def test_a_text_file_goes_with_the_question(page: Chrome, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("three <b>small</b> words")
    record(page)
    assert find(page, "#attach").accessible_name == "Attach files"
    attach(page, file)
    sees(lambda: says(page, CHIPS, "3 words"))
    assert page.switch_to.active_element == find(page, "#question")
    ask(page, "hello")
    sees(lambda: says(page, ".facts", "tokens"))
    assert texts(page, CHIPS) == []
    [body] = sent(page)
    parts = [part["text"] for part in body["messages"][0]["content"]]
    assert parts == ["File “notes.txt”:\n\nthree <b>small</b> words\n", "hello"]
    page.refresh()
    find(page, ".attachments summary").click()
    assert texts(page, ".attachments pre") == ["three <b>small</b> words"]
    record(page)
    press(page, "Edit", 0)
    find(page, ".edited textarea").send_keys(" again" + Keys.ENTER)
    sees(lambda: sent(page))
    parts = [part["text"] for part in sent(page)[0]["messages"][0]["content"]]
    assert (len(parts), parts[-1]) == (2, "hello again")
    sees(lambda: not texts(page, ".growing"))


def test_a_pdf_is_read_as_text(page: Chrome, tmp_path: Path) -> None:
    attach(page, write_pdf(tmp_path / "two.pdf", "The first page.", "And the second."))
    sees(lambda: says(page, CHIPS, "6 words"))
    record(page)
    find(page, "#send").click()  # a file needs no words beside it
    sees(lambda: sent(page))
    [part, empty] = sent(page)[0]["messages"][0]["content"]
    assert part["text"] == "File “two.pdf”:\n\nThe first page.\n\nAnd the second.\n"
    assert empty["text"] == ""
    assert texts(page, "#title") == ["two.pdf"]
    sees(lambda: not texts(page, ".growing"))
    set_size(page, PHONE)
    assert page.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
    set_size(page, DESK)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.png", b"\x89PNG\r\n\x1a\n\x00\xff", "is an image, and the model reads text alone"),
        ("a.bin", b"\x89PNG\r\n\x1a\n\x00\xff", "is neither a PDF nor text in UTF-8"),
        ("zeros.txt", b"a\0b", "is neither a PDF nor text in UTF-8"),
        ("none.txt", b" \n", "is empty"),
        ("long.txt", b"a" * 2_000_001, "has 2,000,001 characters: at most 2,000,000"),
        ("wrong.pdf", b"%PDF-1.4 and no more", "is damaged, or no PDF"),
        ("scan.pdf", None, "has no text: it may be a scan"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    page: Chrome, tmp_path: Path, name: str, data: Any, reason: str
) -> None:
    file = tmp_path / name
    if data is None:
        write_pdf(file, "")
    else:
        file.write_bytes(data)
    attach(page, file)
    sees(lambda: says(page, "#attach-problem", f"{name} {reason}"))
    assert texts(page, CHIPS) == []
    attach(page, write_pdf(tmp_path / "right.pdf", "Well."))
    sees(lambda: says(page, CHIPS, "1 word"))
    assert texts(page, "#attach-problem") == [""]


def test_a_complaint_about_a_file_goes_with_the_next_question(page: Chrome, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text(" ")
    attach(page, tmp_path / "none.txt")
    sees(lambda: says(page, "#attach-problem", "none.txt is empty"))
    page.execute_script("document.getElementById('transfer-note').textContent = 'imported'")
    ask(page, "hello")
    sees(lambda: says(page, ".facts", "tokens"))
    assert texts(page, "#attach-problem") == [""]
    assert page.execute_script("return document.getElementById('transfer-note').textContent") == ""


def test_files_are_dropped_pasted_and_taken_away(page: Chrome) -> None:
    page.execute_script(BRING, "drop", ".chat", "dropped.md", "one")
    page.execute_script(BRING, "paste", "#question", "pasted.csv", "ä,ö")
    names = "#attached b"
    sees(lambda: texts(page, names) == ["dropped.md", "pasted.csv"])
    sees(lambda: not says(page, CHIPS, "reading"))
    find(page, '[title="Remove dropped.md"]').click()
    assert texts(page, names) == ["pasted.csv"]
    assert page.switch_to.active_element == find(page, "#question")


def test_a_kept_conversation_with_wrong_files_is_none(page: Chrome) -> None:
    wrong = {"role": "user", "content": "a", "attachments": [{"name": "x"}]}
    keep(page, {"title": "wrong", "messages": [wrong]})
    assert texts(page, "#conversations .title") == ["New conversation"]
