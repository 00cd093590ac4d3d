import json
import math
import re
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.traces.html import write_page
from lockstep.traces.read_trace import open_run
from tests.browser import BROWSER, WHY_NOT, Page
from tests.unit.numerics.making import call, changed, small_run, stat, write

EVIL = "</script><script>document.title='owned'</script>\"'&<img src=x onerror=alert(1)>"
FRAME = "document.querySelector('#frame table') && document.querySelector('#frame').innerText"


def page(folder, frames, **ranks):
    for rank, own in {"0": frames, **ranks}.items():
        write(folder / "trace", own, rank=int(str(rank).lstrip("r")))
    run = open_run(folder / "trace")
    out = folder / "page.html"
    size = write_page(run.traces, out, title="trace", notes=lambda: run.notes)
    return out, size


def test_rows_stand_in_order_of_execution_also_those_that_come_later(tmp_path):
    frames = [call(0, "a"), call(0, "c"), call(1, "a"), call(1, "b"), call(1, "c"), call(1, "c", phase="backward")]
    out, size = page(tmp_path, frames)
    assert size == (4, 2)
    text = out.read_text(encoding="utf-8")
    index = json.loads(re.search(r'id="index">(.*?)</script>', text)[1])
    assert [index["rows"][row]["name"] + index["rows"][row]["phase"][0] for row in index["order"]] == [
        "af",
        "bf",
        "cf",
        "cb",
    ]
    assert index["batches"] == [0, 1]


def test_the_page_asks_nobody_for_anything(tmp_path):
    out, _ = page(tmp_path, [call(0, EVIL, kind=EVIL)])
    text = out.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    page_itself = re.sub(r'<script type="[^>]*>.*?</script>', "", text, flags=re.DOTALL)  # without the data
    assert not re.search(r"\b(src|href)\s*=|url\(|@import|https?:|fetch\(|import\(", page_itself)
    assert EVIL not in text


def test_a_trace_without_frames_leaves_no_page(tmp_path):
    write(tmp_path / "trace", [])
    with pytest.raises(ConfigError, match="holds no frame"):
        write_page(open_run(tmp_path / "trace").traces, tmp_path / "page.html", title="t")
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    write(tmp_path / "trace", small_run(1))
    with pytest.raises(ConfigError, match=r"nowhere.page.html cannot be written: No such file"):
        write_page(open_run(tmp_path / "trace").traces, tmp_path / "nowhere" / "page.html", title="t")


# ---------------------------------------------------------------- in a real browser

pytestmark_browser = pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)


def cell(module, batch):
    return f".cell[aria-label^='{module},'][aria-label*='batch {batch}:']"


def is_light(page):
    red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    return red + green + blue > 380


@pytestmark_browser
def test_a_cell_is_clicked_and_shows_its_frame(tmp_path):
    frames = changed(small_run(12, 30), 40, 2, nans=True, abs_max=math.nan, tiny=0.25)
    out, _ = page(tmp_path, [*frames, call(12, EVIL, stat("</td>"), kind="<b>")], r1=small_run(12, 30))
    with Page() as browser:
        browser.open(out.as_uri())
        browser.wait("document.body.dataset.ready")
        assert is_light(browser)

        # The mouse: a cell, and its frame on both ranks.
        browser.click(cell("layer.3", 2))
        text = browser.wait(FRAME)
        assert text.startswith("layer.3, Linear, forward, batch 2: abs max 6.25e+00")
        assert re.search(r"rank 0, call 0\s+tensor\s+abs min.*output\s+1.00e-02\s+6.25e\+00\s", text, re.DOTALL)
        assert "rank 1, call 0" in text

        # The loud colour, and the way to it; not by colour alone.
        browser.click("#first-bad")
        browser.wait("document.querySelector('#frame tr.bad')")
        assert browser.evaluate("document.querySelector('#frame tr.bad').innerText").startswith("output\t1.00e-02\tnan")
        bad = f'document.querySelector("{cell("layer.10", 1)}")'
        assert browser.evaluate(f"{bad}.textContent") == "N"
        other = f'document.querySelector("{cell("layer.9", 1)}")'
        loud, calm = browser.evaluate(f"[{bad}, {other}].map((one) => getComputedStyle(one).backgroundColor)")
        assert loud == "rgb(214, 0, 108)" != calm

        # The keyboard: on from there, into the frame, and back.
        browser.press("ArrowDown")
        browser.press("ArrowRight")
        focused = "document.activeElement.getAttribute('aria-label')"
        assert browser.evaluate(focused).startswith("layer.11, Linear, forward, batch 2:")
        browser.press("Enter")
        browser.wait("document.activeElement.id == 'frame'")
        assert browser.evaluate(FRAME).startswith("layer.11, Linear, forward, batch 2")
        browser.press("Escape")
        assert browser.evaluate(focused).startswith("layer.11, Linear, forward, batch 2:")
        browser.press("End", ctrl=True)
        browser.wait(f"{focused}.includes('batch 12')")

        # A name that would be markup is text.
        assert browser.evaluate("document.activeElement.closest('[role=row]').firstChild.innerText").startswith(EVIL)
        browser.press("Enter")
        browser.wait("document.querySelector('#frame').innerText.includes('</td>')")
        assert browser.evaluate("document.title") == "trace - numbers"
        assert browser.evaluate("document.querySelectorAll('img').length") == 0

        # Rows are chosen by name, and by what they hold.
        browser.click("#filter")
        browser.type("layer.10")
        browser.wait("document.querySelector('#status').innerText == '1 of 31 rows shown'")
        browser.evaluate("document.querySelector('#filter').value = ''")
        browser.click("#bad")
        browser.wait("document.querySelector('#status').innerText == '1 of 31 rows shown'")

        assert browser.errors == []
        assert [url for url in browser.requests if url != "about:blank"] == [out.as_uri()]


@pytestmark_browser
def test_what_a_screen_reader_is_told_and_a_dark_screen(tmp_path):
    out, _ = page(tmp_path, small_run(100, 150))
    with Page(dark=True, size=(900, 600)) as browser:
        browser.open(out.as_uri())
        browser.wait("document.body.dataset.ready")
        assert not is_light(browser)

        grid = "document.querySelector('[role=grid]')"
        assert browser.evaluate(f"[{grid}.ariaRowCount, {grid}.ariaColCount]") == ["151", "101"]
        # Of 15 000 cells only those in view are there, and one of them can be reached with Tab.
        assert 0 < browser.evaluate("document.querySelectorAll('[role=gridcell]').length") < 1000
        assert browser.evaluate("document.querySelectorAll('[role=gridcell][tabindex=\"0\"]').length") == 1
        nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
        # Some versions of Chromium keep the space between a label and its field.
        told = {
            (node["role"]["value"], node.get("name", {}).get("value", "").strip()) for node in nodes if "role" in node
        }
        assert ("gridcell", "layer.0, Linear, forward, batch 0: abs max 3.00e+00") in told
        assert ("grid", "Largest absolute value of each module in each batch") in told
        assert ("searchbox", "Module") in told
        assert {("columnheader", "0"), ("rowheader", "layer.0 · Linear")} <= told

        # The far corner, by scrolling.
        browser.evaluate(f"{grid}.scrollTo(1e7, 1e7)")
        browser.wait(f'document.querySelector("{cell("layer.149", 99)}")')
        browser.click(cell("layer.149", 99))
        assert browser.wait(FRAME).startswith("layer.149, Linear, forward, batch 99: abs max 1.64e+02")
        assert browser.errors == []


def test_the_assets_are_part_of_the_package():
    folder = Path(__file__).parents[3] / "src" / "lockstep" / "traces" / "page"
    assert sorted(path.name for path in folder.iterdir()) == ["heatmap.css", "heatmap.js"]
